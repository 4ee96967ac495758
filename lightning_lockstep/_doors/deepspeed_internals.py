"""The door to what DeepSpeed keeps private or does not document, each name with its reason.

What is private in its engines has a separate door, `deepspeed_engines`.

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
from collections.abc import Callable
from typing import Any

from lightning_lockstep._doors import Door

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
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
        f"{_CONFIG}.DEEPSPEED_OPTIMIZERS": _WHY_KEYS,
        f"{_SCHEDULES}.VALID_LR_SCHEDULES": _WHY_KEYS,
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
    config = importlib.import_module(_CONFIG)
    of_zero = getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})
    return {
        **getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),
        **{f"zero_optimization.{key}": advice for key, advice in of_zero.items()},
    }


def optimizer_types() -> list[str]:
    """Return the types of optimizers that are DeepSpeed's own, in lower case."""
    return list(DEEPSPEED.find(f"{_CONFIG}.DEEPSPEED_OPTIMIZERS"))


def optimizers_of(kind: str) -> list[Any]:
    """Return the classes of DeepSpeed that a type of optimizer stands for."""
    return [DEEPSPEED.find(path) for path in _OPTIMIZERS.get(kind, ())]


def schedulers() -> dict[str, Any]:
    """Return DeepSpeed's own schedulers by name."""
    names = DEEPSPEED.find(f"{_SCHEDULES}.VALID_LR_SCHEDULES")
    return {name: getattr(importlib.import_module(_SCHEDULES), name) for name in sorted(names)}


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
    """Return an object and its attributes with which an op is not compiled that only inference on CPUs uses."""
    # The whole table is replaced: to read it is to have every operation probed, compilers and CUDA included.
    return DEEPSPEED.find("deepspeed.ops"), {"__compatible_ops__": {"deepspeed_shm_comm": False}}


def arguments_for_device(index: int) -> argparse.Namespace:
    """Return the arguments of ``initialize`` that give the engine its device."""
    return argparse.Namespace(device_rank=index)


@DEEPSPEED.touches(
    f"{_ENGINE}.destroy",
    why="takes hooks off the module, which would run in addition to those of another engine",
)
def destroy(engine: Any) -> None:
    """Take an engine apart; do nothing with what is none."""
    if hasattr(engine, "destroy"):
        engine.destroy()
