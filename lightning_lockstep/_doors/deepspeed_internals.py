"""The one door to what DeepSpeed keeps private or does not document, each name with its reason.

What its documentation names is public: ``initialize``, ``init_distributed``, ``zero.Init`` and ``GatheredParameters``,
``checkpointing.configure`` and ``reset``, ``utils.safe_set_*``, ``ds_shape`` and ``ds_tensor`` of a parameter; of the
engine its ``optimizer``, ``module`` and ``device``, ``backward``, ``step``, checkpoints, the boundary of accumulation,
``gradient_accumulation_steps``, ``train_micro_batch_size_per_gpu``, ``empty_partition_cache``; ``get_accelerator``,
``set_accelerator`` and the class ``OpBuilder``.

Nothing here imports DeepSpeed before it is called: by then `lightning_lockstep.deepspeed.importing` has.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from lightning_lockstep._doors import Door

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_ZERO_12 = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_ZERO_3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer.BF16_Optimizer"
_FP16 = "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer"
_UNFUSED = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer"
_SCALER = "deepspeed.runtime.fp16.loss_scaler"
_BUILDER = "deepspeed.ops.op_builder.builder"
_ACCELERATOR = "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator"
_GROUPS = "deepspeed.utils.groups"
_CONFIG = "deepspeed.runtime.config"
_SCHEDULES = "deepspeed.runtime.lr_schedules"

# Sections of the configuration that DeepSpeed reads with a model of pydantic, whose fields are the keys.
_MODELS = {
    "bf16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "bfloat16": "deepspeed.runtime.precision_config.DeepSpeedBF16Config",
    "comet": "deepspeed.monitor.config.CometConfig",
    "comms_logger": "deepspeed.comm.config.CommsLoggerConfig",
    "compile": "deepspeed.compile.config.CompileConfig",
    "csv_monitor": "deepspeed.monitor.config.CSVConfig",
    "fp16": "deepspeed.runtime.precision_config.DeepSpeedFP16Config",
    "hybrid_engine": f"{_CONFIG}.HybridEngineConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config.TPTrainingConfig",
    "tensorboard": "deepspeed.monitor.config.TensorBoardConfig",
    "timers.throughput": "deepspeed.utils.config.DeepSpeedThroughputTimerConfig",
    "wandb": "deepspeed.monitor.config.WandbConfig",
    "weight_quantization": "deepspeed.inference.config.WeightQuantConfig",
    "zero_optimization": "deepspeed.runtime.zero.config.DeepSpeedZeroConfig",
}
# Types of optimizers of DeepSpeed's own, and what it makes of them.
_ADAM = ("deepspeed.ops.adam.FusedAdam", "deepspeed.ops.adam.DeepSpeedCPUAdam")
_OPTIMIZERS = {
    "Adagrad": ("deepspeed.ops.adagrad.DeepSpeedCPUAdagrad",),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Lamb": ("deepspeed.ops.lamb.FusedLamb",),
    "Lion": ("deepspeed.ops.lion.FusedLion", "deepspeed.ops.lion.DeepSpeedCPULion"),
}

_WHY_CUDA = "an error of the import that a toolkit for CUDA settles, told by its name: the import has failed"
_WHY_ANOTHER = "the accelerator of a run that was imported for another one"
_WHY_INSTALLED = "ops that were built ahead of time, and for which accelerator"
_WHY_KEYS = "the keys that the configuration may have, and the parameters of optimizers and schedulers in it"
_WHY_BUCKET = "memory of up to some GB that is written before it is read, so that it is no state of a step"

DEEPSPEED = Door(
    "deepspeed",
    {
        f"{_CONFIG}.DeepSpeedConfig": _WHY_KEYS,
        _CONFIG: _WHY_KEYS,
        f"{_SCHEDULES}.VALID_LR_SCHEDULES": _WHY_KEYS,
        _SCHEDULES: _WHY_KEYS,
        **dict.fromkeys(_MODELS.values(), _WHY_KEYS),
        **dict.fromkeys((path for paths in _OPTIMIZERS.values() for path in paths), _WHY_KEYS),
        "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator": _WHY_ANOTHER,
        "deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator": _WHY_ANOTHER,
        f"{_BUILDER}.MissingCUDAException": _WHY_CUDA,
        f"{_BUILDER}.CUDAMismatchException": _WHY_CUDA,
        "deepspeed.git_version_info.installed_ops": _WHY_INSTALLED,
        "deepspeed.git_version_info.accelerator_name": _WHY_INSTALLED,
        "deepspeed.comm.comm": "where the process group is kept, for all engines of a process",
        _GROUPS: "where groups of ranks are kept, for all engines of a process",
        "deepspeed.ops": "has the table of ops",
        "deepspeed.ops.__compatible_ops__": "to read the table is to probe every op, compilers and CUDA included",
        f"{_ENGINE}._set_distributed_vars": "reads the index of the device from args.device_rank, a CPU's too",
        "deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK": "modules that a forward which failed has left",
        "deepspeed.runtime.zero.utils": "compares the order of the modules with rank 0's",
        "deepspeed.runtime.zero.stage_1_and_2.IPGBucket.buffer": _WHY_BUCKET,
        "deepspeed.runtime.zero.stage3.IPGBucketZ3.buffer": _WHY_BUCKET,
        "deepspeed.utils.lazy_init_hp_params_optimizer_state": "links parameters with the optimizer's state, as a first"
        " step does",
    },
)

# -- deepspeed: the import --


@DEEPSPEED.touches(
    f"{_ACCELERATOR}._name",
    why="device_name() of some accelerators is that of another: only this tells them apart",
)
def accelerator_name(accelerator: Any) -> Any:
    """Return the name of an accelerator, as ``DS_ACCELERATOR`` has it."""
    return accelerator._name


def make_accelerator(name: str) -> Any:
    """Return a new accelerator; raise ImportError or AttributeError where DeepSpeed has none of this name."""
    module = importlib.import_module(f"deepspeed.accelerator.{name}_accelerator")
    return getattr(module, f"{name.upper()}_Accelerator")()


def lacks_cuda(error: BaseException) -> bool:
    """Return whether an error says that CUDA's compiler is missing."""
    return type(error).__name__ == "MissingCUDAException"


def has_other_cuda(error: BaseException) -> bool:
    """Return whether an error says that CUDA's compiler is of another version than torch."""
    return type(error).__name__ == "CUDAMismatchException"


# -- deepspeed: the keys of the configuration --


def let_read(config: dict[str, Any]) -> None:
    """Let DeepSpeed read a configuration."""
    DEEPSPEED.find(f"{_CONFIG}.DeepSpeedConfig")(config)


def config_models() -> dict[str, Any]:
    """Return the models with which DeepSpeed reads some sections, by path."""
    return {path: DEEPSPEED.find(model) for path, model in _MODELS.items()}


@DEEPSPEED.touches(
    f"{_CONFIG}._REMOVED_TOP_LEVEL_CONFIG_KEYS",
    f"{_CONFIG}._REMOVED_ZERO_CONFIG_KEYS",
    why="keys that are refused, one at a time and on the ranks, with advice; 0.19.0 has none of them",
)
def removed_keys() -> dict[str, str]:
    """Return the keys that DeepSpeed refuses since it has removed them, by path, with its advice."""
    config = DEEPSPEED.find(_CONFIG)
    of_zero = getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})
    return {
        **getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),
        **{f"zero_optimization.{key}": advice for key, advice in of_zero.items()},
    }


def optimizers_of(kind: str) -> list[Any]:
    """Return the classes of DeepSpeed that a type of optimizer stands for."""
    return [DEEPSPEED.find(path) for path in _OPTIMIZERS.get(kind, ())]


def schedulers() -> dict[str, Any]:
    """Return DeepSpeed's own schedulers by name."""
    names = sorted(DEEPSPEED.find(f"{_SCHEDULES}.VALID_LR_SCHEDULES"))
    return {name: getattr(DEEPSPEED.find(_SCHEDULES), name) for name in names}


# -- deepspeed, doctor: ops --


@DEEPSPEED.touches(f"{_ACCELERATOR}.create_op_builder", why="the builder of an op, by the name of its class")
def make_op_builder(name: str) -> Any:
    """Return a builder of the accelerator; where that lacks the op, ``None`` or a builder of nothing."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator().create_op_builder(name)


@DEEPSPEED.touches(f"{_BUILDER}.OpBuilder.name", why="which op a builder builds, which may be none")
def op_name(builder: Any) -> str:
    """Return the name of the op of a builder."""
    name: str = builder.name
    return name


def is_installed(op: str) -> bool:
    """Return whether an op was built ahead of time, for whatever accelerator."""
    return bool(DEEPSPEED.find("deepspeed.git_version_info.installed_ops").get(op, False))


def is_installed_for_this_accelerator(op: str) -> bool:
    """Return whether an op was built ahead of time, for the accelerator of this run."""
    from deepspeed.accelerator import get_accelerator

    built_for = DEEPSPEED.find("deepspeed.git_version_info.accelerator_name")
    return is_installed(op) and bool(built_for == accelerator_name(get_accelerator()))


@DEEPSPEED.touches(f"{_BUILDER}.OpBuilder._loaded_ops", why="an op that is loaded need not be built")
def is_loaded(builder: Any) -> bool:
    """Return whether the op of a builder is loaded in this process."""
    return op_name(builder) in getattr(builder, "_loaded_ops", {})


@DEEPSPEED.touches(
    f"{_BUILDER}.OpBuilder.is_compatible", why="whether an op can be built here, as DeepSpeed sees it"
)
def is_compatible(builder: Any) -> bool:
    """Return whether the op of a builder can be built here."""
    return bool(builder.is_compatible(verbose=False))


@DEEPSPEED.touches(
    f"{_BUILDER}.OpBuilder.has_function",
    why="looks for a library as the build will: it honours CFLAGS and LDFLAGS",
)
def finds_function(builder: Any, function: str, library: str) -> bool:
    """Return whether a program with a function of a library links."""
    return bool(builder.has_function(function, (library,)))


def load_op(builder: Any) -> None:
    """Load an op, and build it where that is needed; raise whatever the build raises."""
    builder.load(verbose=False)


@DEEPSPEED.touches(f"{_BUILDER}.OpBuilder.load", why="the moment at which an op is built, by each rank alone")
def load_of_ops() -> Callable[..., Any]:
    """Return the method that loads an op."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    load: Callable[..., Any] = OpBuilder.load
    return load


def put_load_of_ops(load: Callable[..., Any]) -> None:
    """Let all ops be loaded by another method."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    OpBuilder.load = load


# -- deepspeed: the process group, the engine --


@DEEPSPEED.touches("deepspeed.comm.comm.cdb", why="the process group, which is to be forgotten with torch's")
def has_process_group() -> bool:
    """Return whether DeepSpeed knows of a process group."""
    return DEEPSPEED.find("deepspeed.comm.comm").cdb is not None


@DEEPSPEED.touches(
    f"{_GROUPS}._WORLD_GROUP",
    f"{_GROUPS}._ZERO_PARAM_INTRA_PARALLEL_GROUP",
    f"{_GROUPS}._EXPERT_PARALLEL_GROUP",
    f"{_GROUPS}._EXPERT_PARALLEL_GROUP_RANKS",
    f"{_GROUPS}._EXPERT_DATA_PARALLEL_GROUP",
    f"{_GROUPS}._EXPERT_DATA_PARALLEL_GROUP_RANKS",
    f"{_GROUPS}._ALL_TO_ALL_GROUP",
    f"{_GROUPS}._TENSOR_MODEL_PARALLEL_GROUP",
    f"{_GROUPS}._MODEL_PARALLEL_GROUP",
    f"{_GROUPS}._DATA_PARALLEL_GROUP",
    f"{_GROUPS}.mesh_device",
    why="groups of ranks of a process group that is gone; the next job of a sweep has another",
)
def forget_process_group() -> None:
    """Let DeepSpeed be as it was before it knew of a process group."""
    DEEPSPEED.find("deepspeed.comm.comm").cdb = None
    groups = DEEPSPEED.find(_GROUPS)
    for path in DEEPSPEED.names:
        owner, _, name = path.rpartition(".")
        if owner != _GROUPS:
            continue
        kept = getattr(groups, name, None)
        if isinstance(kept, dict):
            kept.clear()
        elif kept is not None:
            setattr(groups, name, None)


def without_op_for_shared_memory() -> tuple[Any, dict[str, Any]]:
    """Return an object and its attributes with which an op is not compiled that only inference on CPUs uses.

    The whole table is replaced: to read it is to have every operation probed, compilers and CUDA included.
    """
    return DEEPSPEED.find("deepspeed.ops"), {"__compatible_ops__": {"deepspeed_shm_comm": False}}


def arguments_for_device(index: int) -> argparse.Namespace:
    """Return the arguments of ``initialize`` that give the engine its device."""
    return argparse.Namespace(device_rank=index)


@DEEPSPEED.touches(
    f"{_ENGINE}.destroy", why="takes hooks off the module, which would run beside those of another engine"
)
def destroy(engine: Any) -> None:
    """Take an engine apart; do nothing with what is none."""
    if hasattr(engine, "destroy"):
        engine.destroy()


@DEEPSPEED.touches(
    f"{_ENGINE}.zero_optimization_partition_weights",
    why="whether parameters are divided among the ranks, as in stage 3",
)
def divides_parameters(engine: Any) -> bool:
    """Return whether an engine divides parameters among the ranks."""
    return bool(engine.zero_optimization_partition_weights())


# -- deepspeed: steps --


@DEEPSPEED.touches(
    f"{_ENGINE}.global_steps",
    why="how many optimizer steps there were, to tell one from an accumulated batch",
)
def optimizer_steps(engine: Any) -> int:
    """Return how many optimizer steps an engine has made."""
    steps: int = engine.global_steps
    return steps


@DEEPSPEED.touches(
    "deepspeed.runtime.zenflow.engine.configure_zenflow.zenflow",
    why="ZenFlow has boundaries of accumulation of its own",
)
def has_own_boundaries(engine: Any) -> bool:
    """Return whether an engine decides itself after which batches it steps."""
    return bool(getattr(engine, "zenflow", False))


@DEEPSPEED.touches(
    f"{_ENGINE}.torch_autocast_enabled",
    f"{_ENGINE}.torch_autocast_dtype",
    why="the autocast that the engine enters around a forward, for one that it does not notice",
)
def autocast_dtype(engine: Any) -> torch.dtype | None:
    """Return the dtype of the autocast that an engine enters around a forward, if any."""
    if not engine.torch_autocast_enabled():
        return None
    dtype: torch.dtype = engine.torch_autocast_dtype()
    return dtype


# -- deepspeed: the loss scale --


@DEEPSPEED.touches(
    f"{_ENGINE}.torch_autocast_z0_gradscaler",
    why="torch's loss scaler in stage 0, which has to see bad gradients",
)
def torch_scaler_of_engine(engine: Any) -> Any:
    """Return the loss scaler of torch that an engine has without ZeRO, if any."""
    return getattr(engine, "torch_autocast_z0_gradscaler", None)


@DEEPSPEED.touches(
    f"{_ZERO_12}.torch_autocast_gradscaler",
    f"{_ZERO_3}.torch_autocast_gradscaler",
    f"{_BF16}.torch_autocast_gradscaler",
    why="torch's loss scaler under ZeRO, which knows the scale",
)
def torch_scaler(engine: Any) -> Any:
    """Return the loss scaler of torch that an engine or its optimizer has, if any."""
    return torch_scaler_of_engine(engine) or getattr(engine.optimizer, "torch_autocast_gradscaler", None)


@DEEPSPEED.touches(
    f"{_ZERO_12}.overflow",
    f"{_ZERO_3}.overflow",
    f"{_FP16}.overflow",
    f"{_UNFUSED}.overflow",
    why="whether the last optimizer step was skipped; it is part of a checkpoint too",
)
def last_overflow(optimizer: Any) -> bool | None:
    """Return whether the last step of an optimizer was skipped, ``None`` of one that does not look."""
    return bool(optimizer.overflow) if hasattr(optimizer, "overflow") else None


def set_overflow(optimizer: Any, overflow: Any) -> None:
    """Let an optimizer take its last step for one that was skipped, or for one that was not."""
    optimizer.overflow = overflow


@DEEPSPEED.touches(
    *(
        f"{of}.{name}"
        for of in (_ZERO_12, _ZERO_3, _BF16, _FP16)
        for name in ("custom_loss_scaler", "external_loss_scale")
    ),
    why="a loss scale that the program sets itself",
)
def given_scale(optimizer: Any) -> tuple[Any] | None:
    """Return the loss scale that the program has set, in a tuple; ``None`` where it sets none."""
    return (optimizer.external_loss_scale,) if getattr(optimizer, "custom_loss_scaler", False) else None


@DEEPSPEED.touches(
    f"{_ZERO_12}.loss_scaler", f"{_ZERO_3}.loss_scaler", why="the scaler of ZeRO, part of a checkpoint"
)
def loss_scaler(optimizer: Any) -> Any:
    """Return the loss scaler that ZeRO's optimizer has, if any."""
    return getattr(optimizer, "loss_scaler", None)


@DEEPSPEED.touches(
    f"{_ZERO_12}.dtype",
    f"{_ZERO_3}.dtype",
    f"{_SCALER}.LossScalerBase.dynamic",
    f"{_SCALER}.LossScalerBase.cur_scale",
    f"{_SCALER}.DynamicLossScaler.min_scale",
    f"{_SCALER}.DynamicLossScaler.scale_window",
    f"{_SCALER}.DynamicLossScaler.delayed_shift",
    f"{_SCALER}.DynamicLossScaler.raise_error_at_min_scale",
    why="the loss scale of ZeRO in stages 1 to 3, and how it changes",
)
def scale_of_zero(optimizer: Any) -> dict[str, Any] | None:
    """Return what ZeRO's optimizer says of its loss scale, as fields of ``StepOutcome``; ``None`` of another one."""
    import torch

    if not hasattr(optimizer, "loss_scaler"):
        return None
    scaler = loss_scaler(optimizer)
    if optimizer.dtype != torch.float16:
        return {}  # it has a scaler too, which does nothing
    if not scaler.dynamic:
        return {"scale": float(scaler.cur_scale)}
    return {
        "scale": float(scaler.cur_scale),
        "is_dynamic": True,
        "floor": float(scaler.min_scale),
        "window": int(scaler.scale_window),
        "hysteresis": int(scaler.delayed_shift),
        "ends_at_floor": bool(scaler.raise_error_at_min_scale),
    }


@DEEPSPEED.touches(
    f"{_FP16}.loss_scale_config",
    f"{_UNFUSED}.loss_scale_config",
    f"{_SCALER}.LossScaleConfig.use_grad_scaling",
    f"{_SCALER}.LossScaleConfig.dynamic_loss_scale",
    f"{_SCALER}.LossScaleConfig.cur_scale",
    f"{_SCALER}.LossScaleConfig.min_loss_scale",
    f"{_SCALER}.LossScaleConfig.scale_window",
    why="the loss scale without ZeRO, and how it changes",
)
def scale_of_whole(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer that is not partitioned says of its loss scale, as fields of ``StepOutcome``."""
    # Older releases keep these on the optimizer itself.
    config = getattr(optimizer, "loss_scale_config", optimizer)
    if not getattr(config, "use_grad_scaling", hasattr(config, "cur_scale")):
        return {}
    if not config.dynamic_loss_scale:
        return {"scale": float(config.cur_scale)}
    return {
        "scale": float(config.cur_scale),
        "is_dynamic": True,
        "floor": float(config.min_loss_scale),
        "window": int(config.scale_window),
    }


# -- deepspeed: gradients of this rank, and steps that are skipped --

_WHY_SKIP = "where an optimizer looks for an overflow, by which it skips a step"


@DEEPSPEED.touches(f"{_ZERO_3}._overflow_check_and_loss_scale_update", why=_WHY_SKIP)
@DEEPSPEED.touches(f"{_ZERO_12}.check_overflow", f"{_ZERO_12}.check_grad_overflow", why=_WHY_SKIP)
@DEEPSPEED.touches(
    f"{_ZERO_12}.bit16_groups", why="the parameters of stages 1 and 2 that an optimizer has, by groups"
)
def kind_of_optimizer(
    optimizer: Any,
) -> Literal["stage 3", "stages 1 and 2", "bf16", "fp16", "unknown"] | None:
    """Return how an optimizer keeps its gradients: ``None`` where as torch's does, if it is one of torch's."""
    kind: Literal["stage 3", "stages 1 and 2", "bf16", "fp16"]
    needed: tuple[str, ...]
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        kind, needed = "stage 3", ("_overflow_check_and_loss_scale_update",)
    elif hasattr(optimizer, "averaged_gradients"):
        kind, needed = "stages 1 and 2", ("bit16_groups", "check_overflow", "check_grad_overflow")
    elif hasattr(optimizer, "fp32_groups_gradients"):  # gradients in float32
        kind, needed = "bf16", ("clear_hp_grads", "clear_lp_grads")
    elif hasattr(optimizer, "overflow_checker"):  # stage 0, 16 bits
        kind, needed = "fp16", ()
    else:
        return None
    return kind if all(hasattr(optimizer, name) for name in needed) else "unknown"


@DEEPSPEED.touches(
    f"{_ZERO_3}.grad_partitions_flat_buffer",
    why="this rank's part of all gradients in stage 3, in one vector",
)
def divided_gradients(optimizer: Any) -> Tensor:
    """Return this rank's gradients in stage 3."""
    gradients: Tensor = optimizer.grad_partitions_flat_buffer
    return gradients


@DEEPSPEED.touches(
    f"{_ZERO_12}.cpu_offload",
    f"{_ZERO_12}.averaged_gradients",
    f"{_ZERO_12}.all_grad_tensors",
    f"{_ZERO_12}._fill_param_grad_accum_attribute.grad_accum",
    "deepspeed.runtime.zero.stage_1_and_2.GradPartitionBufferGroup.flat_partition",
    why="this rank's part of all gradients in stages 1 and 2, before and after they are reduced",
)
def partition_gradients(optimizer: Any) -> Iterator[Tensor]:
    """Yield the gradients of stages 1 and 2: as reduced before a step, else as accumulated so far."""
    # With offload the optimizer looks at them itself before a step, on their way to the host.
    if getattr(optimizer, "cpu_offload", False):
        return
    reduced = [group for group in optimizer.averaged_gradients.values() if group]
    for group in reduced:
        flat = getattr(group, "flat_partition", None)
        yield from (g for g in ([flat] if flat is not None else group) if g is not None)
    if reduced:
        return
    for kept in getattr(optimizer, "all_grad_tensors", {}).values():
        yield from (g for g in kept or [] if g is not None)
    for group in optimizer.bit16_groups:
        for parameter in group:
            for name in ("grad", "grad_accum"):
                gradient = getattr(parameter, name, None)
                if gradient is not None:
                    yield gradient


@DEEPSPEED.touches(f"{_BF16}.fp32_groups_gradients", why="gradients in float32 of an optimizer of bfloat16")
def bf16_gradients(optimizer: Any) -> Sequence[Sequence[Tensor]]:
    """Return the gradients of an optimizer of bfloat16 that keeps them in float32, by groups."""
    groups: Sequence[Sequence[Tensor]] = optimizer.fp32_groups_gradients
    return groups


@DEEPSPEED.touches(
    f"{_FP16}.fp16_groups",
    f"{_UNFUSED}.fp16_groups",
    f"{_ZERO_3}.fp16_groups",
    why="the parameters that an optimizer has, by groups",
)
def fp16_groups(optimizer: Any) -> list[list[Tensor]]:
    """Return the parameters of an optimizer of stage 0 for 16 bits, or of stage 3, by groups."""
    groups: list[list[Tensor]] = optimizer.fp16_groups
    return groups


@DEEPSPEED.touches(
    f"{_ZERO_12}.local_overflow", why="a bad value that the optimizer found itself, as with offload"
)
def has_local_overflow(optimizer: Any) -> bool:
    """Return whether an optimizer itself has found a bad value in this rank's part."""
    return bool(getattr(optimizer, "local_overflow", False))


def finding_overflow(optimizer: Any, found: Callable[..., bool]) -> dict[str, Any]:
    """Return the attributes with which ZeRO's optimizer asks ``found`` whether there is an overflow."""
    is_stage_3 = hasattr(optimizer, "grad_partitions_flat_buffer")
    values: dict[str, Any] = {
        "_overflow_check_and_loss_scale_update" if is_stage_3 else "check_overflow": found
    }
    if hasattr(optimizer, "check_grad_overflow"):
        values["check_grad_overflow"] = True
    return values


@DEEPSPEED.touches(
    f"{_FP16}.overflow_checker",
    f"{_UNFUSED}.overflow_checker",
    "deepspeed.runtime.utils.CheckOverflow.has_overflow",
    "deepspeed.runtime.utils.CheckOverflow.check",
    "deepspeed.runtime.utils.CheckOverflow.check_using_norm",
    why=_WHY_SKIP,
)
def checking_overflow(optimizer: Any, found: Callable[..., bool]) -> tuple[Any, dict[str, Any]]:
    """Return what looks for overflows without ZeRO, and the attributes with which it asks ``found``."""
    return optimizer.overflow_checker, dict.fromkeys(("has_overflow", "check", "check_using_norm"), found)


@DEEPSPEED.touches(
    f"{_BF16}.clear_hp_grads", f"{_BF16}.clear_lp_grads", why="a step that is skipped lets its gradients go"
)
def let_gradients_go(optimizer: Any) -> None:
    """Clear the gradients of an optimizer of bfloat16, in both precisions."""
    optimizer.clear_hp_grads()
    optimizer.clear_lp_grads()


# -- deepspeed: trials of a batch size --

#: Attributes of the engine's objects whose values are no state of a step.
WITHOUT_STATE = frozenset({"buffer"})


def modules_in_forward() -> list[Any]:
    """Return the modules of which a forward is under way, as far as DeepSpeed knows."""
    modules: list[Any] = DEEPSPEED.find("deepspeed.runtime.zero.parameter_offload.FWD_MODULE_STACK")
    return modules


@DEEPSPEED.touches(
    "deepspeed.runtime.zero.utils.dist", why="the comparison of the order of modules with rank 0's"
)
def alone_in_comparison() -> tuple[Any, dict[str, Any]]:
    """Return an object and its attributes with which the order of the modules is compared on this rank alone."""
    alone = SimpleNamespace(get_rank=lambda: 0, broadcast=lambda *a, **k: None)
    return DEEPSPEED.find("deepspeed.runtime.zero.utils"), {"dist": alone}


@DEEPSPEED.touches(
    f"{_ENGINE}.micro_steps", why="trials begin with the first of the batches that are accumulated"
)
def at_first_batch() -> dict[str, Any]:
    """Return the attributes of an engine that has accumulated nothing."""
    return {"micro_steps": 0}


_WHY_SIZES = "a run goes on with the sizes that a search has found, by which the engine counts samples"


@DEEPSPEED.touches(f"{_ENGINE}.train_batch_size", why=_WHY_SIZES)
def train_batch_size(engine: Any) -> int:
    """Return how many samples all ranks take for an optimizer step."""
    size: int = engine.train_batch_size()
    return size


@DEEPSPEED.touches(f"{_ENGINE}.set_train_batch_size", why=_WHY_SIZES)
def set_train_batch_size(engine: Any, size: int) -> None:
    """Let all ranks take so many samples for an optimizer step, by accumulating more or fewer batches."""
    engine.set_train_batch_size(size)


@DEEPSPEED.touches(f"{_ENGINE}.dp_world_size", why=_WHY_SIZES)
def set_accumulation(engine: Any, passes: int) -> None:
    """Let an engine accumulate so many batches."""
    set_train_batch_size(engine, engine.train_micro_batch_size_per_gpu() * passes * engine.dp_world_size)


@DEEPSPEED.touches(f"{_ENGINE}.set_train_micro_batch_size", why=_WHY_SIZES)
@DEEPSPEED.touches(
    f"{_ZERO_12}.gradient_accumulation_steps",
    f"{_ZERO_3}.gradient_accumulation_steps",
    why="ZeRO's optimizer divides gradients by it",
)
def set_sizes(engine: Any, *, batch_size: int, accumulate: int) -> None:
    """Let an engine take batches of another size, and accumulate so many."""
    engine.set_train_micro_batch_size(batch_size)
    set_train_batch_size(engine, batch_size * accumulate * engine.dp_world_size)
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = accumulate


def attributes_of_trial(optimizer: Any, passes: int) -> list[tuple[Any, dict[str, Any]]]:
    """Return objects that may not be there, and attributes that they may have, with the values for a trial."""
    return [
        (optimizer, {"gradient_accumulation_steps": passes}),
        # A step that is skipped for an overflow would not show what the optimizer needs.
        (loss_scaler(optimizer), {"cur_scale": 1.0}),
    ]


@DEEPSPEED.touches(
    f"{_ZERO_12}.reduce_bucket_size",
    f"{_ZERO_3}.reduce_bucket_size",
    why="memory that a small model does not touch",
)
def largest_bucket(optimizer: Any) -> int | None:
    """Return how many elements the buckets of ZeRO's optimizer hold at most."""
    return getattr(optimizer, "reduce_bucket_size", None)


def with_bucket(size: int) -> dict[str, Any]:
    """Return the attributes of an optimizer whose buckets hold so many elements at most."""
    return {"reduce_bucket_size": size}


# -- deepspeed: checkpoints --


@DEEPSPEED.touches(
    f"{_BF16}.refresh_fp32_params",
    f"{_ZERO_12}.refresh_fp32_params",
    f"{_ZERO_3}.refresh_fp32_params",
    f"{_FP16}.refresh_fp32_params",
    f"{_UNFUSED}.refresh_fp32_params",
    why="the float32 copies of weights that were loaded",
)
def refresh_copies(optimizer: Any) -> None:
    """Make the float32 copies of an optimizer those of the weights, where it has copies."""
    refresh = getattr(optimizer, "refresh_fp32_params", None)
    if refresh is not None:
        refresh()


@DEEPSPEED.touches(
    f"{_ENGINE}.skipped_steps",
    f"{_ENGINE}.global_samples",
    f"{_ENGINE}.loaded_checkpoint_dp_world_size",
    why="the counters of a run that goes on, as load_checkpoint sets them",
)
def set_counters(engine: Any, *, steps: int, skipped: int, samples: int, ranks: int) -> None:
    """Let an engine go on counting from a checkpoint that so many ranks have written."""
    engine.global_steps, engine.skipped_steps = steps, skipped
    engine.global_samples = samples
    engine.loaded_checkpoint_dp_world_size = ranks


@DEEPSPEED.touches(f"{_ENGINE}.zero_nvme_offload_optimizer", why="a state on NVMe cannot be redivided")
def keeps_state_on_nvme(engine: Any) -> bool:
    """Return whether the state of the optimizer is kept on NVMe."""
    return bool(engine.zero_nvme_offload_optimizer())


@DEEPSPEED.touches(
    *(f"{of}.optimizer" for of in (_ZERO_12, _ZERO_3, _BF16, _FP16, _UNFUSED)),
    why="torch's optimizer inside of DeepSpeed's, which has the options and the state",
)
def torch_optimizer(engine: Any) -> Any:
    """Return torch's optimizer inside of that of an engine."""
    return engine.optimizer.optimizer


@DEEPSPEED.touches(f"{_ENGINE}.param_names", why="the names by which a checkpoint knows parameters")
def parameter_names(engine: Any) -> Mapping[Any, str]:
    """Return the names of the parameters of an engine."""
    names: Mapping[Any, str] = engine.param_names
    return names


_WHY_SUB_GROUPS = "stage 3 divides the groups of parameters further"


@DEEPSPEED.touches(f"{_BF16}.bf16_groups", why="the parameters that an optimizer of bfloat16 has, by groups")
@DEEPSPEED.touches(f"{_ZERO_3}.sub_group_to_group_id", why=_WHY_SUB_GROUPS)
def parameter_groups(engine: Any) -> list[list[Any]]:
    """Return the parameters of each group of the engine's optimizer."""
    optimizer = engine.optimizer
    if not divides_parameters(engine):
        return list(getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups)
    found: list[list[Any]] = [[] for _ in torch_optimizer(engine).param_groups]
    for number, parameters in enumerate(fp16_groups(optimizer)):
        found[optimizer.sub_group_to_group_id[number]] += parameters
    return found


@DEEPSPEED.touches(f"{_ZERO_3}.fp32_partitioned_groups_flat", why=_WHY_SUB_GROUPS)
def vectors_of_groups(optimizer: Any) -> list[tuple[int, Tensor]]:
    """Return the vectors of stage 3 in their order, each with the number of its group."""
    vectors = enumerate(optimizer.fp32_partitioned_groups_flat)
    return [(optimizer.sub_group_to_group_id[number], vector) for number, vector in vectors]


@DEEPSPEED.touches(
    f"{_ZERO_12}.round_robin_gradients", why="vectors then have another order than their groups"
)
def reorders_gradients(optimizer: Any) -> bool:
    """Return whether the vectors of an optimizer have another order than its groups of parameters."""
    return bool(getattr(optimizer, "round_robin_gradients", False))


@DEEPSPEED.touches(
    f"{_ZERO_12}.round_robin_bit16_padding", why="0.19.8 has the right places only where it is padded"
)
def padded(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer whose vectors are all padded."""
    return {"round_robin_bit16_padding": [[1]] * len(optimizer.bit16_groups)}


@DEEPSPEED.touches(
    f"{_ZERO_12}._link_all_hp_params", why="tells each parameter where its part is in a vector"
)
def link_parts(optimizer: Any) -> None:
    """Let each parameter of stage 1 or 2 know where its part is."""
    optimizer._link_all_hp_params()


def link_state(parameters: Sequence[Any], vector: Tensor, state: Mapping[Tensor, Any]) -> None:
    """Let each parameter of stage 1 or 2 find its state, as DeepSpeed does after a first step."""
    DEEPSPEED.find("deepspeed.utils.lazy_init_hp_params_optimizer_state")(parameters, vector, state)


@DEEPSPEED.touches(
    "deepspeed.utils.link_hp_params._hp_mapping", why="whether a part of a parameter is on this rank"
)
def has_part_here(parameter: Any) -> bool:
    """Return whether this rank has a part of a parameter of stage 1 or 2."""
    return parameter._hp_mapping is not None
