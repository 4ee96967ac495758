"""The keys that DeepSpeed knows, and those of a configuration that it does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from lightning_lockstep._settings import Faults, did_you_mean

# -- Every key that DeepSpeed reads from its config, and the parameters of its optimizers and schedulers --
# They are written down here so that a config is checked without the seconds that ``import deepspeed``
# takes, and where it is not installed. ``tests/deepspeed/test_known_keys.py`` compares them with the
# installed release.

#: The release of DeepSpeed that these tables are of.
RELEASE = "0.19.8"

#: Names of keys; ``None`` is the content of one that holds a value, or a section in which users choose the names.
Keys = Mapping[str, Any]


def _keys(names: str, **sections: Keys) -> Keys:
    return {**dict.fromkeys(names.split()), **sections}


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


_OFFLOAD_OPTIMIZER = _keys(
    "buffer_count cpuadam_cores_perc device fast_init nvme_path pin_memory pipeline_read pipeline_write ratio"
    " super_offload"
)
_OFFLOAD_PARAM = _keys("buffer_count buffer_size device max_in_cpu nvme_path pin_memory")
_ZENFLOW = _keys(
    "auto_ratio full_warm_up_rounds offload overlap_step pt_reserved_cores_perc select_interval select_strategy"
    " steps_per_epoch topk_ratio update_interval"
)
# Keys of stage 3 that DeepSpeed takes with and without ``stage3_`` before them.
_STAGE3 = _names(
    "allgather_sequential gather_16bit_weights_on_model_save max_live_parameters max_reuse_distance"
    " model_persistence_threshold module_granularity_threshold param_persistence_threshold prefetch_bucket_size"
    " use_all_reduce_for_fetch_params"
)
_ZERO = _keys(
    "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param"
    " cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters legacy_stage1"
    " load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear overlap_comm override_module_apply"
    " parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients"
    " save_muon_momentum_buffer_in_memory stage stage3_gather_fp16_weights_on_model_save sub_group_size"
    " use_multi_rank_bucket_allreduce zero_hpz_partition_size zero_quantized_gradients"
    " zero_quantized_nontrainable_weights zero_quantized_weights "
    + " ".join(f"{name} stage3_{name}" for name in sorted(_STAGE3)),
    leaf_module=_keys("classes name_suffixes names"),
    offload_optimizer=_OFFLOAD_OPTIMIZER,
    offload_param=_OFFLOAD_PARAM,
    zenflow=_ZENFLOW,
)
_FP16 = _keys(
    "auto_cast consecutive_hysteresis enabled fp16_master_weights_and_grads hysteresis initial_scale_power loss_scale"
    " loss_scale_window min_loss_scale"
)
_BF16 = _keys(
    "bf16_master_weights_and_grads bf16_optimizer_states check_grad_overflow enabled immediate_grad_update"
)
_DATA_EFFICIENCY = _keys(
    "enabled seed",
    data_sampling=_keys(
        "curriculum_learning enabled num_epochs num_workers pin_memory",
        dynamic_batching=_keys(
            "enabled lr_scaling_method max_batch_size max_tokens metrics_path min_batch_size sequence_picking_order"
            " verbose"
        ),
    ),
    data_routing=_keys("enabled random_ltd"),
)
_AUTOTUNING = _keys(
    "arg_mappings enabled end_profile_step exps_dir fast max_train_batch_size max_train_micro_batch_size_per_gpu metric"
    " metric_path min_train_batch_size min_train_micro_batch_size_per_gpu model_info_path mp_size"
    " num_tuning_micro_batch_sizes overwrite results_dir start_profile_step tuner_early_stopping tuner_num_trials"
    " tuner_type",
    model_info=_keys("hidden_size num_layers num_params profile"),
)
_CHECKPOINT = _keys(
    "checkpoint_serialization load_universal tag_validation use_node_local_storage",
    parallel_write=_keys("pipeline_stage"),
    writer=_keys(
        "data_parallel decoupled io_buffer_double io_buffer_size io_multiplier show_statistics type"
    ),
)
_COMPILE = _keys(
    "autoep_non_moe debug_log deepcompile double_buffer free_activation free_activation_threshold"
    " keep_all_input_tensors keep_int_input_tensors offload_activation offload_activation_pin_memory offload_opt_states"
    " offload_parameters passes symmetric_memory sync_after_allgather sync_after_reduce sync_before_allgather"
    " sync_before_reduce"
)
_TP = _keys("mpu tp_grain_size tp_group tp_size")
_TENSOR_PARALLEL = _keys(
    "autotp_size dtype injection_policy_tuple keep_module_on_host kernel_inject partition_config preset_model"
    " replace_with_kernel_inject tp_overlap_comm vocab_parallel_ce_backend vocab_parallel_lm_head",
    tensor_parallel=_TP,
    tp=_TP,
)
_EXPERT_PARALLEL = _keys(
    "async_split_plan autoep_size combine_impl comm_backend comm_max_tokens_per_rank comm_num_sm comm_qp_margin"
    " disable_triton_grouped_mm enabled expert_activation expert_pattern expert_tensor_parallel_size expert_w1"
    " expert_w2 expert_w3 gate_up_impl has_shared_experts load_balance_coeff moe_layer_pattern num_expert_groups"
    " num_experts_attr num_limited_groups preset_model route_norm route_scale router_pattern routed_scaling_factor"
    " row_weighting_impl score_apply score_func shared_experts_gate_pattern shared_experts_pattern top_k top_k_attr"
    " use_grouped_mm validate_folding_routing"
)
_COMET = _keys(
    "api_key enabled experiment_key experiment_name mode online project samples_log_interval workspace"
)

#: Every key of a config, a section as a mapping of its keys.
KNOWN: Keys = _keys(
    "allgather_size communication_data_type data_parallel_size dataloader_drop_last datastates_ckpt"
    " disable_allgather disable_python_gc dump_state gradient_accumulation_steps gradient_allreduce_op"
    " gradient_clipping gradient_predivide_factor"
    " log_level managed_gradient_accumulation memory_breakdown prescale_gradients seq_parallel_communication_data_type"
    " sequence_parallel_size steps_per_print train_batch_size train_micro_batch_size_per_gpu"
    " use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown zero_allow_untested_optimizer"
    " zero_force_ds_cpu_optimizer",
    activation_checkpointing=_keys(
        "contiguous_memory_optimization cpu_checkpointing number_checkpoints partition_activations profile"
        " synchronize_checkpoint_boundary"
    ),
    aio=_keys("block_size intra_op_parallelism overlap_events queue_depth single_submit use_gds"),
    autotuning=_AUTOTUNING,
    bf16=_BF16,
    bfloat16=_BF16,
    checkpoint=_CHECKPOINT,
    comet=_COMET,
    comms_logger=_keys("debug enabled prof_all prof_ops verbose"),
    compile=_COMPILE,
    csv_monitor=_keys("enabled job_name output_path"),
    data_efficiency=_DATA_EFFICIENCY,
    data_types=_keys("buffer_dtype grad_accum_dtype keep_in_fp32_modules param_dtype"),
    expert_parallel=_EXPERT_PARALLEL,
    flops_profiler=_keys(
        "detailed enabled module_depth output_file profile_step recompute_fwd_factor top_modules"
    ),
    fp16=_FP16,
    hybrid_engine=_keys(
        "enable_cuda_graph enabled inference_tp_size max_out_tokens pin_parameters release_inference_cache"
        " tp_gather_partition_size"
    ),
    optimizer=_keys("legacy_fusion params type"),
    pipeline=_keys(
        "activation_checkpoint_interval grad_partitioned partition pipe_partitioned seed_layers stages use_reentrant"
    ),
    scheduler=_keys("params type"),
    tensor_parallel=_TENSOR_PARALLEL,
    tensorboard=_keys("enabled job_name output_path"),
    timers=_keys("", throughput=_keys("enabled synchronized")),
    torch_autocast=_keys("dtype enabled lower_precision_safe_modules"),
    wandb=_keys("enabled group project team"),
    weight_quantization=_keys("enabled num_bits post_init_quant q_groups q_type quantized_initialization"),
    zero_optimization=_ZERO,
)

#: Keys of a section that are one and the same, by its path.
SAME: Mapping[str, tuple[tuple[str, str], ...]] = {
    "tensor_parallel": (("tensor_parallel", "tp"), ("replace_with_kernel_inject", "kernel_inject")),
    "zero_optimization": tuple((name, f"stage3_{name}") for name in sorted(_STAGE3)),
}

#: What DeepSpeed no longer has, by path, with what takes its place.
REMOVED: Mapping[str, str] = {
    "amp": "Write 'fp16' or 'bf16', or choose the Trainer's precision.",
    "compression_training": "The model would train without compression; compress it afterwards, with another tool.",
    "curriculum_learning": "Write data_efficiency.data_sampling.curriculum_learning.",
    "eigenvalue": "It was a part of quantize_training, which was removed too.",
    "elasticity": "Write train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps.",
    "graph_harvesting": "Nothing takes its place.",
    "nebula": "Checkpoints would go to the local disk; let the Trainer save them.",
    "progressive_layer_drop": "Nothing takes its place; drop layers in the model itself.",
    "quantize_training": "Nothing takes its place; quantize in the model itself.",
    "sparse_attention": "Nothing takes its place; use an attention of PyTorch.",
    "sparse_gradients": "An Embedding made with sparse=True has sparse gradients without a key.",
    "zero_optimization.mics_hierarchical_params_gather": "Use zero_hpz_partition_size.",
    "zero_optimization.mics_shard_size": "Use zero_hpz_partition_size.",
    "zero_optimization.zeropp_loco_param": "zero_quantized_gradients works without it.",
}

_ADAM = "adam_w_mode amsgrad betas bias_correction eps fp32_optimizer_states lr set_grad_none torch_adam weight_decay"
#: Parameters of Adam and AdamW with ``torch_adam``.
TORCH_ADAM_PARAMS = _names(
    "adam_w_mode amsgrad betas capturable differentiable eps foreach fp32_optimizer_states fused lr maximize torch_adam"
    " weight_decay"
)
_LAMB = "amsgrad betas bias_correction eps eps_inside_sqrt lr max_coeff min_coeff weight_decay"
_ADAGRAD = (
    "amsgrad differentiable eps foreach fp32_optimizer_states fused initial_accumulator_value lr lr_decay maximize"
    " weight_decay"
)
_LION = "betas fp32_optimizer_states lr set_grad_none weight_decay"
_MUON = (
    "adam_lr adam_w_mode betas eps foreach fp32_optimizer_states lr momentum muon_lr ns_method per_head_muon torch_adam"
    " weight_decay"
)
#: Parameters of each type of optimizer that is DeepSpeed's own, in lower case; ``None`` for those of the package mup.
OPTIMIZER_PARAMS: Mapping[str, frozenset[str] | None] = {
    "adagrad": _names(_ADAGRAD),
    "adam": _names(_ADAM),
    "adamw": _names(_ADAM),
    "lamb": _names(_LAMB),
    "lion": _names(_LION),
    "muon": _names(_MUON),
    "muadam": None,
    "muadamw": None,
    "musgd": None,
}
#: The same, as they are usually written.
OPTIMIZER_TYPES = ("Adagrad", "Adam", "AdamW", "Lamb", "Lion", "MuAdam", "MuAdamW", "Muon", "MuSGD")

_WARMUP = "last_batch_iteration warmup_num_steps warmup_type"
_ONE_CYCLE = (
    "cycle_first_stair_count cycle_first_step_size cycle_max_lr cycle_max_mom cycle_min_lr cycle_min_mom cycle_momentum"
    " cycle_second_stair_count cycle_second_step_size decay_lr_rate decay_mom_rate decay_step_size last_batch_iteration"
)
_RANGE_TEST = (
    "last_batch_iteration lr_range_test_min_lr lr_range_test_staircase"
    " lr_range_test_step_rate lr_range_test_step_size"
)
#: Parameters of each scheduler of DeepSpeed's own.
SCHEDULER_PARAMS: Mapping[str, frozenset[str]] = {
    "LRRangeTest": _names(_RANGE_TEST),
    "OneCycle": _names(_ONE_CYCLE),
    "WarmupCosineLR": _names(f"{_WARMUP} cos_min_ratio total_num_steps warmup_min_ratio"),
    "WarmupDecayLR": _names(f"{_WARMUP} total_num_steps warmup_max_lr warmup_min_lr"),
    "WarmupLR": _names(f"{_WARMUP} warmup_max_lr warmup_min_lr"),
}


# -- A key that DeepSpeed does not know is a fault, with the nearest right ones --
# DeepSpeed itself ignores such a key in most sections, and refuses it on every rank in the others. The
# tables are those of one release; where another is installed, a key that only its sources have is right
# too.


def check_keys(config: Mapping[str, Any], faults: Faults) -> None:
    """Add a fault for each key that DeepSpeed does not know, at every level, with the nearest right ones."""
    # Keys that begin with an underscore are comments. Parameters of optimizers and schedulers that are not
    # DeepSpeed's own, and the other places where names are chosen freely, are not looked at.
    _check_section(config, KNOWN, "", faults)
    _check_one_spelling(config, faults)
    _check_optimizer(config, faults)
    _check_scheduler(config, faults)


def is_comment(key: object) -> bool:
    """Return whether a key is there for readers only: it begins with an underscore."""
    return isinstance(key, str) and key.startswith("_")


def _check_section(given: Mapping[str, Any], known: Keys, path: str, faults: Faults) -> None:
    for key, value in given.items():
        here = f"{path}{key}"
        if here in REMOVED and not _is_of_another_release(str(key), only_older=True):
            faults.add(f"{here}: DeepSpeed has removed this key. {REMOVED[here]} Remove it.")
        elif not isinstance(key, str) or (key not in known and not is_comment(key)):
            if not _is_of_another_release(str(key)):
                faults.add(f"{here}: DeepSpeed has no such key{_in(path)}.{_advice(str(key), known, path)}")
        elif known.get(key) is not None:
            if isinstance(value, Mapping):
                _check_section(value, known[key], f"{here}.", faults)
            elif not _may_be_plain(here, value):
                faults.check(False, here, value, f"a section with keys such as {_some_of(known[key])}")


def _check_one_spelling(config: Mapping[str, Any], faults: Faults) -> None:
    for path, pairs in SAME.items():
        inner = config.get(path)
        if not isinstance(inner, Mapping):
            continue
        for name, other in pairs:
            if name in inner and other in inner:
                faults.add(
                    f"{path}.{name}={inner[name]!r} and {path}.{other}={inner[other]!r}: expected one of the two, which"
                    " are the same key."
                )


def _check_optimizer(config: Mapping[str, Any], faults: Faults) -> None:
    name, params = _type_and_params(config, "optimizer")
    if name is None:
        return
    kind = name.lower()
    if kind not in OPTIMIZER_PARAMS:
        import torch.optim

        # DeepSpeed looks every other name up there.
        if not hasattr(torch.optim, name) and not _is_of_another_release(kind):
            near = did_you_mean(name, [*OPTIMIZER_TYPES, *torch.optim.__all__])
            expected = f"one of {', '.join(OPTIMIZER_TYPES)}, or a class of torch.optim"
            faults.add(f"optimizer.type={name!r}: expected {expected}.{near}")
        return
    known = OPTIMIZER_PARAMS[kind]
    if kind in ("adam", "adamw") and params.get("torch_adam") is True:
        known = TORCH_ADAM_PARAMS
    if known is not None:
        _check_params("optimizer", name, params, known, faults)


def _check_scheduler(config: Mapping[str, Any], faults: Faults) -> None:
    name, params = _type_and_params(config, "scheduler")
    if name is None:
        return
    if name in SCHEDULER_PARAMS:
        _check_params("scheduler", name, params, SCHEDULER_PARAMS[name], faults)
        return
    from torch.optim import lr_scheduler

    if not hasattr(lr_scheduler, name):
        near = did_you_mean(name, [*SCHEDULER_PARAMS, *lr_scheduler.__all__])
        expected = f"one of {', '.join(SCHEDULER_PARAMS)}, or a class of torch.optim.lr_scheduler"
        faults.add(f"scheduler.type={name!r}: expected {expected}.{near}")


def _type_and_params(config: Mapping[str, Any], section: str) -> tuple[str | None, Mapping[str, Any]]:
    given = config.get(section)
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        return None, {}
    params = given.get("params")
    return given["type"], params if isinstance(params, Mapping) else {}


def _check_params(
    section: str, name: str, params: Mapping[str, Any], known: frozenset[str], faults: Faults
) -> None:
    for key in params:
        path = f"{section}.params.{key}"
        if key == "max_grad_norm" and section == "optimizer":
            faults.add(
                f"{path}={params[key]!r}: DeepSpeed does not clip gradients in the optimizer. Write"
                " gradient_clipping at the top of the config, or give the Trainer gradient_clip_val."
            )
        elif key not in known and not is_comment(key):
            advice = did_you_mean(str(key), known) or f" It takes {', '.join(sorted(known))}."
            faults.add(f"{path}: DeepSpeed's {name} has no such parameter.{advice}")


def _advice(key: str, known: Keys, path: str) -> str:
    """Return the nearest keys: of this section, else of all others, as a key is often put one level too high."""
    near = did_you_mean(key, known)
    if near:
        return near
    elsewhere = [
        place for place in _paths(KNOWN) if place.rpartition(".")[2] == key and place != f"{path}{key}"
    ]
    if elsewhere:
        return f" Did you mean {' or '.join(map(repr, elsewhere[:2]))}?"
    return f" It takes {', '.join(sorted(known))}." if path else ""


def _paths(known: Keys, path: str = "") -> Iterator[str]:
    for key, inner in known.items():
        yield f"{path}{key}"
        if inner is not None:
            yield from _paths(inner, f"{path}{key}.")


def _is_of_another_release(key: str, *, only_older: bool = False) -> bool:
    """Return whether the installed DeepSpeed is of another release than the tables, and has a key that they lack."""
    installed = _installed()
    if installed is None or installed == Version(RELEASE) or (only_older and installed > Version(RELEASE)):
        return False
    if any(place.rpartition(".")[2] == key for place in _paths(KNOWN)):
        return False  # it is a key of another section
    return re.search(rf"\b{re.escape(key)}\b", _sources_of_installed()) is not None


def _installed() -> Version | None:
    try:
        return Version(importlib.metadata.version("deepspeed"))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return None


@cache
def _sources_of_installed() -> str:
    """Return the files in which DeepSpeed names the keys of its config; nothing is imported."""
    spec = importlib.util.find_spec("deepspeed")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    files = [
        path
        for folder in folders
        for name in ("*config*.py", "constants.py")
        for path in Path(folder).rglob(name)
    ]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def _in(path: str) -> str:
    return f" in {path.rstrip('.')}" if path else ""


def _some_of(known: Keys) -> str:
    return ", ".join(sorted(known)[:3])


def _may_be_plain(path: str, value: object) -> bool:
    # No section at all; the former form of ZeRO, which is on or off; and flags that DeepSpeed reads as off.
    return value is None or (path == "zero_optimization" and isinstance(value, bool))
