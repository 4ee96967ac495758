"""Every key that DeepSpeed reads from its config, and the parameters of its optimizers and schedulers.

They are written down here so that a config is checked without the seconds that ``import deepspeed`` takes, and where
it is not installed. ``tests/deepspeed/test_known_keys.py`` compares them with the installed release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "KNOWN",
    "OPTIMIZER_PARAMS",
    "OPTIMIZER_TYPES",
    "RELEASE",
    "REMOVED",
    "SAME",
    "SCHEDULER_PARAMS",
    "TORCH_ADAM_PARAMS",
    "Keys",
]

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
