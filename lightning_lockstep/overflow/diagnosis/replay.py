"""Replaying one batch exactly as it was: same weights, same buffers, same random numbers.

A :class:`StepRecord` is made at the very start of ``training_step``, below DDP and inside autocast, so that
it holds what the model was given. It keeps references and a few small copies, never an activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._doors.torch_internals import may_be_compiled
from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.overflow.diagnosis.frame_recorder import FrameRecorder
from lightning_lockstep.steps.capabilities import RunsLater
from lightning_lockstep.steps.isolated import isolated, run_forward_backward
from lightning_lockstep.steps.patching import put_in_place
from lightning_lockstep.steps.random_state import RandomState
from lightning_lockstep.steps.snapshot import BufferCopies, Gradients, ModuleAttributes, Snapshot

__all__ = ["Replayed", "StepRecord", "replay"]


@dataclass
class StepRecord:
    """What it takes to replay one ``training_step``."""

    function: Callable[..., Any]  # the ``training_step`` itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState  # at its start
    buffers: BufferCopies  # at its start
    batch_number: int  # from 0, over all epochs
    batch_idx: int  # of the epoch
    loss: Tensor | None = None  # detached, as it went into the backward; None: before that
    optimizer_steps: int = 0  # begun inside it so far (manual optimization)
    activation_flag: Tensor | None = None  # on the device: 0, or nan if one was bad; None: unchecked
    stepped: bool = False  # an optimizer was about to step
    skipped: bool = False  # such a step was skipped
    notes: list[str] = field(default_factory=list)  # for the report
    place: tuple[int, int] | None = None  # (epoch, optimizer step) at its start; None: those of now
    device_seed: int | None = None  # of random numbers that a strategy keeps for its devices
    bad_gradients: list[str] | None = None  # names, where the gradients are others by now


@dataclass(frozen=True)
class Replayed:
    """How a replay ended."""

    loss: Tensor | None  # detached, as it went into the backward; None: there was none
    answered: int  # collectives of the step that were answered on this rank alone


def replay(
    trainer: Trainer,
    module: LightningModule,
    record: StepRecord,
    recorder: FrameRecorder,
    *,
    answer_collectives: bool,  # on this rank alone; otherwise all ranks must replay now
    by_call: bool = False,  # within a call of the module, where a strategy's hooks gather parameters
) -> Replayed:
    """Run the recorded step again under a recorder, and leave no trace of it.

    Gradients, buffers, random states, plain attributes of modules (metric states among them) and
    ``requires_grad`` flags are put back. DDP is bypassed, so nothing is reduced; nothing is logged; no optimizer
    steps. Costs one forward and one backward with hooks, and a second set of gradients while it runs.
    """
    losses: list[Tensor] = []
    step = partial(_called_by, module, record.function) if by_call else record.function

    @contextmanager
    def backward(loss: Tensor) -> Iterator[None]:
        losses.append(loss.detach())
        recorder.begin_backward()
        try:
            yield
        finally:
            recorder.in_backward = False

    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        now = RandomState.capture()
        stack.enter_context(Snapshot(now, BufferCopies(module), ModuleAttributes(module), Gradients(module)))
        record.random.restore()
        stack.enter_context(_seeded(trainer, record.device_seed))
        record.buffers.restore()
        answers = stack.enter_context(isolated(trainer, module, answer_collectives=answer_collectives))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder.recording())
        recorder.check_batch(record.args[0] if record.args else None)
        run_forward_backward(
            trainer,
            module,
            partial(step, *record.args, **record.kwargs),
            optimizer_steps=record.optimizer_steps,
            around_backward=backward,
        )
        recorder.finish()
    return Replayed(losses[-1] if losses else None, answers.count)


@contextmanager
def _seeded(trainer: Trainer, seed: int | None) -> Iterator[None]:
    strategy = trainer.strategy
    if seed is None or not isinstance(strategy, RunsLater):
        yield
        return
    now = strategy.device_seed()
    strategy.set_device_seed(seed)
    try:
        yield
    finally:
        strategy.set_device_seed(now)


def _called_by(module: LightningModule, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function in the place of ``module.forward``, once."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return function(*args, **kwargs)

    put_back = put_in_place(module, "forward", forward)
    return module(*args, **kwargs)


def _uncompiled() -> Any:
    """Run what ``torch.compile`` compiled as plain Python, where hooks fire."""
    return torch.compiler.set_stance("force_eager") if may_be_compiled() else nullcontext()
