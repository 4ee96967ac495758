"""Configs as the documentation of DeepSpeed, Transformers and Accelerate shows them."""

from __future__ import annotations

from typing import Any

import torch

#: Whether this CPU computes in float16, as DeepSpeed asks; private in torch.
HAS_FLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

#: Facts of https://www.deepspeed.ai/docs/config-json and of the tutorials beside it.
OF_DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero-infinity": {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
                "pin_memory": False,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": False,
                "ratio": 0.3,
                "buffer_count": 4,
                "pipeline_read": False,
                "pipeline_write": False,
                "fast_init": False,
            },
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    "zero++": {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1000000,
            "zero_hpz_partition_size": 16,
            "zero_quantized_weights": True,
            "zero_quantized_gradients": True,
        }
    },
}

_AUTO_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_AUTO_SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
_AUTO_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_AUTO_SIZES = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}

#: Facts of https://huggingface.co/docs/transformers/deepspeed and https://huggingface.co/docs/accelerate.
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "transformers-zero-2": {
        "fp16": _AUTO_FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": _AUTO_OPTIMIZER,
        "scheduler": _AUTO_SCHEDULER,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        **_AUTO_SIZES,
    },
    "accelerate-zero-3": {
        "bf16": {"enabled": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "prefetch_bucket_size": "auto",
            "param_persistence_threshold": "auto",
            "gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "steps_per_print": float("inf"),
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    },
}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 0.1, **params}}}


OFFLOADED = zero(offload_optimizer={"device": "cpu"})
PARTLY_OFFLOADED = zero(offload_optimizer={"device": "cpu", "ratio": 0.3})
RATIO = "zero_optimization.offload_optimizer.ratio"
NVME = {"device": "nvme", "nvme_path": "/nvme"}
