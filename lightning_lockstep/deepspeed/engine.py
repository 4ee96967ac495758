"""DeepSpeed's engine, made from what Lightning and this package know of the run."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_lockstep._doors.deepspeed_internals import (
    arguments_for_device,
    forget_process_group,
    has_process_group,
    without_op_for_shared_memory,
)
from lightning_lockstep.deepspeed.configuration.reading import for_evaluation
from lightning_lockstep.distributed import at_shut_down
from lightning_lockstep.steps.patching import replaced

__all__ = ["adopt_process_group", "divided_as_made", "evaluation_config", "make_engine"]

_log = logging.getLogger(__name__)


def adopt_process_group(
    *,
    rank: int,
    local_rank: int,  # on its node
    world_size: int,
    address: str,
    port: int,
    timeout: timedelta,  # of DeepSpeed's own sub-groups
) -> Callable[[], None]:  # takes the variables back
    """Let DeepSpeed use the process group that exists, whatever its backend.

    DeepSpeed reads who this rank is from environment variables, and in an MPI job would start MPI to find out
    where one is missing. The variables are taken back when the run has ended: the next Trainer of this
    process would take them for a sign that somebody else has started the ranks. What DeepSpeed keeps of the
    group is forgotten with the group: the next job of a sweep has another.
    """
    import deepspeed

    if not has_process_group():
        at_shut_down(forget_process_group)
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    with _without_shared_memory_op():
        deepspeed.init_distributed(auto_mpi_discovery=False, timeout=timeout, verbose=False)
    return partial(_restore_environment, before)


def _restore_environment(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _without_shared_memory_op() -> AbstractContextManager[None]:
    """Keep DeepSpeed from compiling an operation for CPUs that only inference uses, half a minute on every rank."""
    ops, values = without_op_for_shared_memory()
    return replaced(ops, **values)


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
    printed = io.StringIO()  # DeepSpeed prints how much memory is in use, past its own logger
    with redirect_stdout(printed):
        engine, engine_optimizer, _, _ = deepspeed.initialize(
            args=arguments_for_device(device_index),
            config=dict(config),
            model=module,
            model_parameters=trained,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
    if printed.getvalue():
        _log.debug(printed.getvalue())
    return engine, engine_optimizer
