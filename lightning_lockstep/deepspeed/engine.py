"""The engine under Lightning's Trainer: how it is made, what its ranks must agree on, gradients and skipped steps."""

from __future__ import annotations

import argparse
import io
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._settings import restore_variables
from lightning_lockstep.deepspeed.config import for_evaluation
from lightning_lockstep.deepspeed.engine_adapters import adapter_of
from lightning_lockstep.deepspeed.precision import LossScaleHistory
from lightning_lockstep.distributed import Communicator, at_shut_down
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- DeepSpeed's activation checkpointing, set as the configuration says --


def configure_activation_checkpointing(config: Mapping[str, Any]) -> None:
    """Set what ``deepspeed.checkpointing.checkpoint`` does, which it keeps in global variables."""
    # Lightning's own hands over neither the number of checkpoints, without which contiguous memory is
    # refused, nor whether the device is waited for; and it leaves what another fit of this process has set.
    import deepspeed

    section = config.get("activation_checkpointing") or {}
    deepspeed.checkpointing.configure(
        mpu_=None,
        partition_activations=section.get("partition_activations"),
        contiguous_checkpointing=section.get("contiguous_memory_optimization"),
        num_checkpoints=section.get("number_checkpoints"),
        checkpoint_in_cpu=section.get("cpu_checkpointing"),
        synchronize=section.get("synchronize_checkpoint_boundary"),
        profile=section.get("profile"),
    )


# -- Work that each rank does alone, and whose errors are those of all --

_Result = TypeVar("_Result")


def agreed(communicator: Communicator, work: Callable[[], _Result]) -> _Result:
    """Return the result here, or raise on all ranks the ConfigurationError that the work raises on some."""
    result = None
    faults: tuple[str, ...] = ()
    try:
        result = work()
    except ConfigurationError as error:
        faults = error.faults
    failed = communicator.agree(bool(faults), "\n".join((socket.gethostname(), *faults)))
    if not failed:
        return result  # type: ignore[return-value]  # it has returned
    said = {reason.partition("\n")[2] for reason in failed.reasons.values()}
    if len(said) == 1 and len(failed.reasons) == communicator.world_size:
        raise ConfigurationError(faults)
    raise ConfigurationError(
        [
            f"rank {rank} on {host}: {' '.join(lines)}"
            for rank, (host, *lines) in ((rank, text.splitlines()) for rank, text in failed.reasons.items())
        ]
    )


# -- Gradients of this rank, and optimizer steps that are skipped, as OverflowDetector needs them
# DeepSpeed has public functions for one whole gradient, which gather it from all ranks. What each step
# needs is the part of all gradients that lies on this rank, which each of its optimizers keeps in another place.


class GradientsOfEngine:
    """Gradients and optimizer steps of a DeepSpeed engine, as one rank sees them."""

    def __init__(self, engine: Any, history: LossScaleHistory | None = None) -> None:
        self._engine, self._history, self._adapter = engine, history, adapter_of(engine)
        if not self._adapter.keeps_gradients:
            raise ConfigurationError(
                f"OverflowDetector does not know where {type(engine.optimizer).__name__} of this DeepSpeed keeps"
                " gradients. Use DeepSpeed 0.19, another stage of ZeRO, or strategy='lockstep_ddp' to find the"
                " overflow."
            )

    def steps_now(self) -> bool:
        """Return whether the engine's next ``step()`` changes weights, and not only counts an accumulated batch."""
        return bool(self._engine.is_gradient_accumulation_boundary())

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients accumulated so far; the same tensors at every step if it can."""
        return list(self._adapter.gradients())

    def known_bad(self) -> bool:
        """Return whether the engine itself has found a bad value in this rank's part, as it does when offloading."""
        return self._adapter.has_local_overflow()

    def skip_step(self, optimizer: Any = None) -> None:
        """Have the engine skip its next optimizer step as after an overflow that it found itself."""
        # Weights and the optimizer's state stay, gradients are let go, the skip is counted, a dynamic loss
        # scale falls.
        if self._history is not None:
            self._history.expect_skip()
        self._adapter.skip_step()

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor (``min_loss_scale``, else 0); ``None`` where the loss is not scaled."""
        outcome = self._adapter.outcome()
        if outcome is None or outcome.scale is None:
            return None
        return outcome.scale, outcome.floor or 0.0

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far; the same on every rank."""
        return None if self._history is None else self._history.verdict()


# -- DeepSpeed's engine, made from what Lightning and this package know of the run --

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
    """Let DeepSpeed use the process group that exists, whatever its backend."""
    # DeepSpeed reads who this rank is from environment variables, and in an MPI job would start MPI to find
    # out where one is missing. The variables are taken back when the run has ended: the next Trainer of this
    # process would take them for a sign that somebody else has started the ranks. What DeepSpeed keeps of the
    # group is forgotten with the group.
    import deepspeed

    if deepspeed.comm.comm.cdb is None:
        at_shut_down(_forget_process_group)
    variables = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    # Or it compiles an operation for CPUs that only inference uses, half a minute on every rank. The whole table is
    # replaced, because to read it is to have every operation probed, compilers and CUDA included.
    with replaced(deepspeed.ops, __compatible_ops__={"deepspeed_shm_comm": False}):
        deepspeed.init_distributed(auto_mpi_discovery=False, timeout=timeout, verbose=False)
    return partial(restore_variables, before)


# Groups of ranks that DeepSpeed keeps in its module of groups.
_GROUPS = (
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    "_ALL_TO_ALL_GROUP",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "mesh_device",
)


def _forget_process_group() -> None:
    """Let DeepSpeed be as it was before it knew of a process group: the next job of a sweep has another."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    for name in _GROUPS:
        kept = getattr(groups, name, None)
        if isinstance(kept, dict):
            kept.clear()
        elif kept is not None:
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
    printed = io.StringIO()  # DeepSpeed prints how much memory is in use, past its own logger
    with redirect_stdout(printed):
        engine, engine_optimizer, _, _ = deepspeed.initialize(
            args=argparse.Namespace(
                device_rank=device_index
            ),  # read for the index of the device, a CPU's too
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
