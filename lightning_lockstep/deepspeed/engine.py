"""The engine under Lightning's Trainer: how it is made, what its ranks must agree on, gradients and skipped steps."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_lockstep._settings import restore_variables
from lightning_lockstep.deepspeed.config_parsing import for_evaluation
from lightning_lockstep.distributed import at_shut_down
from lightning_lockstep.steps.patching import replaced

# -- DeepSpeed's engine, made from what Lightning and this package know of the run --


def adopt_process_group(local_rank: int, timeout: timedelta) -> Callable[[], None]:  # takes the variable back
    """Let DeepSpeed use the process group that exists, whatever its backend; the timeout is of its own sub-groups."""
    # DeepSpeed reads the local rank from the environment. It is removed when the run has ended, because the next
    # Trainer of this process would take it for a sign that somebody else has started the ranks. What DeepSpeed keeps
    # of the group is forgotten with the group.
    import deepspeed

    if deepspeed.comm.comm.cdb is None:
        at_shut_down(_forget_process_group)
    before = {"LOCAL_RANK": os.environ.get("LOCAL_RANK")}
    os.environ["LOCAL_RANK"] = str(local_rank)
    # Else it compiles an operation for CPUs that only inference uses, half a minute on every rank. The whole table is
    # replaced, because reading it probes every operation, compilers and CUDA included.
    with replaced(deepspeed.ops, __compatible_ops__={"deepspeed_shm_comm": False}):
        deepspeed.init_distributed(auto_mpi_discovery=False, timeout=timeout, verbose=False)
    return partial(restore_variables, before)


def _forget_process_group() -> None:
    """Let DeepSpeed be as it was before it knew of a process group: the next job of a sweep has another."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups.mesh_device = None
    for name, kept in vars(groups).items():
        if "_GROUP" in name and isinstance(kept, dict):
            kept.clear()
        elif name.startswith("_") and name.endswith("_GROUP"):
            setattr(groups, name, None)


def evaluation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a complete configuration that an engine needs which does not train."""
    found = for_evaluation(config)
    if not _is_divided(config):
        del found["zero_optimization"]
    return {"train_micro_batch_size_per_gpu": 1, **found}


def divided_as_made(config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Divide parameters among the ranks as the body, on all ranks together, makes them; in stage 3."""
    if not _is_divided(config):
        return nullcontext()
    import deepspeed

    dividing: AbstractContextManager[None] = deepspeed.zero.Init(
        config_dict_or_path=evaluation_config(config)
    )
    return dividing


def _is_divided(config: Mapping[str, Any]) -> bool:
    return bool(config["zero_optimization"]["stage"] == 3)


def make_engine(
    module: nn.Module,
    config: Mapping[str, Any],
    *,
    device_index: int,  # any number on a CPU
    optimizer: Optimizer | None = None,  # None: the configuration has one, or nothing is trained
    lr_scheduler: Any = None,  # of the optimizer; DeepSpeed points it at its own
    trains: bool = True,
) -> tuple[Any, Any]:
    """Return DeepSpeed's engine around a module, and its optimizer; on all ranks together."""
    import deepspeed

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad] if trains else []
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints how much memory is in use, past its own logger
        engine, engine_optimizer, _, _ = deepspeed.initialize(
            # Read for the index of the device, a CPU's too.
            args=argparse.Namespace(device_rank=device_index),
            config=dict(config),
            model=module,
            model_parameters=trained,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
    return engine, engine_optimizer
