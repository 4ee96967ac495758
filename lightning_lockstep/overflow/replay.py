"""Running one batch again exactly as it was: same weights, same buffers, same random numbers.

A :class:`StepRecord` is taken at the very start of ``training_step``, below DDP and inside autocast, so that
it sees what the model sees. It keeps references and a few small copies, never an activation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.overflow.frame_recorder import FrameRecorder
from lightning_lockstep.steps.random_state import RandomState

__all__ = ["BufferKeeper", "StepRecord", "replay"]

# Buffers up to this size [elements] are copied each step; batch norm changes its own without a trace.
_SMALL = 65_536


class BufferKeeper:
    """Copies of a module's buffers, refreshed for little.

    Small buffers are copied each time in one fused call. Large ones (masks, tables) hardly ever change: they
    are copied when their version counter says that something wrote to them.

    Args:
        module: The module whose buffers to keep.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [(m, name) for m in module.modules() for name in m._buffers]
        self._originals: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._versions: list[int] = []

    def refresh(self) -> None:
        """Make the copies equal to the buffers as they are now."""
        if not self._places:
            return
        now = [b for m, name in self._places if (b := m._buffers.get(name)) is not None and not b.is_meta]
        if len(now) != len(self._originals) or any(
            a is not b for a, b in zip(now, self._originals, strict=True)
        ):
            self._originals = now
            self._copies = [b.detach().clone() for b in now]
        else:
            stale = [i for i, b in enumerate(now) if b.numel() <= _SMALL or b._version != self._versions[i]]
            if stale:
                with torch.no_grad():
                    torch._foreach_copy_([self._copies[i] for i in stale], [now[i] for i in stale])
        self._versions = [b._version for b in now]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Give the module its kept buffers for as long as the context lasts, then those of now."""
        held = [(m, name, b) for m, name in self._places if (b := m._buffers.get(name)) is not None]
        values = [buffer.detach().clone() for _, _, buffer in held]
        try:
            with torch.no_grad():
                for original, copy in zip(self._originals, self._copies, strict=True):
                    original.copy_(copy)
            yield
        finally:
            with torch.no_grad():
                for (module, name, buffer), value in zip(held, values, strict=True):
                    buffer.copy_(value)
                    module._buffers[name] = buffer


@dataclass
class StepRecord:
    """All it takes to run one ``training_step`` again.

    Attributes:
        function: The ``training_step`` itself.
        args: What it was called with.
        kwargs: What it was called with.
        random: Random state at its start.
        buffers: Buffers at its start.
        batch_number: Number of the batch, from 0, over all epochs.
        batch_idx: Number of the batch in its epoch.
        loss: The loss that came out, detached and as it went into the backward; ``None`` before that.
        optimizer_steps: Optimizer steps begun inside it so far (manual optimisation).
        seen: Zero, or nan if an activation was bad; on the device. ``None`` where none was watched.
        stepped: Whether an optimizer was about to step.
        skipped: Whether such a step was left out.
        notes: What to say in the report.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    buffers: BufferKeeper
    batch_number: int
    batch_idx: int
    loss: Tensor | None = None
    optimizer_steps: int = 0
    seen: Tensor | None = None
    stepped: bool = False
    skipped: bool = False
    notes: list[str] = field(default_factory=list)


class _ReachedFailingStep(Exception):  # noqa: N818  (a signal, no error)
    """Ends a replay at the optimizer step that was about to go wrong."""


def replay(
    trainer: Trainer, module: LightningModule, record: StepRecord, recorder: FrameRecorder
) -> Tensor | None:
    """Run the recorded step again under a recorder, and leave no trace of it.

    Gradients, buffers, random states, metric states and ``requires_grad`` flags are put back. DDP is bypassed,
    so nothing is reduced; nothing is logged; no optimizer steps.

    Args:
        trainer: The Trainer of the run.
        module: Its LightningModule, not wrapped.
        record: The step.
        recorder: What is to watch.

    Returns:
        The loss as it goes into the backward, detached; ``None`` if there was none.

    Ranks: any rank, alone, unless the model itself talks to other ranks in its forward (SyncBatchNorm).
    Costs one forward and one backward with hooks, and a second set of gradients while it runs.
    """
    with ExitStack() as stack:
        for context in (
            _uncompiled(),
            _own_random_state(record.random),
            record.buffers.in_force(),
            _own_gradients(module),
            _own_metrics(module),
            _silent(module),
        ):
            stack.enter_context(context)
        losses = stack.enter_context(_intercepted(trainer, module, record, recorder))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder.recording())
        recorder.look_at_batch(record.args[0] if record.args else None)
        output = None
        try:
            with trainer.precision_plugin.train_step_context():
                output = record.function(*record.args, **record.kwargs)
        except _ReachedFailingStep:
            pass
        if module.automatic_optimization and (loss := _loss_of(output)) is not None:
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, None)
        recorder.finish()
    return losses[-1] if losses else None


@contextmanager
def _intercepted(
    trainer: Trainer, module: LightningModule, record: StepRecord, recorder: FrameRecorder
) -> Iterator[list[Tensor]]:
    """Have the strategy run a plain backward and no optimizer step."""
    strategy, precision = trainer.strategy, trainer.precision_plugin
    losses: list[Tensor] = []
    steps = 0

    def backward(loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        scaler = getattr(precision, "scaler", None)
        loss = loss if scaler is None else scaler.scale(loss)
        losses.append(loss.detach())
        recorder.begin_backward()
        if loss.requires_grad:
            precision.backward(loss, module, optimizer, *args, **kwargs)
        recorder.in_backward = False
        return loss.detach()

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        result = closure()
        steps += 1
        if steps >= record.optimizer_steps:
            raise _ReachedFailingStep
        return result

    held = {name: strategy.__dict__.get(name) for name in ("backward", "optimizer_step")}
    # In manual optimisation Lightning counts steps in these.
    optimizers = strategy._lightning_optimizers
    counters = [(o._on_before_step, o._on_after_step) for o in optimizers]
    strategy.__dict__.update(backward=backward, optimizer_step=optimizer_step)
    for optimizer in optimizers:
        optimizer._on_before_step = optimizer._on_after_step = _nothing
    try:
        yield losses
    finally:
        for optimizer, (before, after) in zip(optimizers, counters, strict=True):
            optimizer._on_before_step, optimizer._on_after_step = before, after
        for name, former in held.items():
            del strategy.__dict__[name]
            if former is not None:
                strategy.__dict__[name] = former


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


@contextmanager
def _own_random_state(state: RandomState) -> Iterator[None]:
    now = RandomState.capture()
    state.restore()
    try:
        yield
    finally:
        now.restore()


@contextmanager
def _own_gradients(module: LightningModule) -> Iterator[None]:
    """Set gradients and ``requires_grad`` flags aside; those of a toggled optimizer are as at the step's start."""
    toggled = dict(getattr(module, "_param_requires_grad_state", {}))
    held = [(p, p.grad, p.requires_grad) for p in module.parameters()]
    for parameter, _, flag in held:
        parameter.grad = None
        parameter.requires_grad_(toggled.get(parameter, flag))
    module._param_requires_grad_state = {}
    try:
        yield
    finally:
        for parameter, gradient, flag in held:
            parameter.grad = gradient
            parameter.requires_grad_(flag)
        module._param_requires_grad_state = toggled


@contextmanager
def _own_metrics(module: nn.Module) -> Iterator[None]:
    """Put the states of torchmetrics back afterwards; they are not buffers."""
    metrics: list[Any] = [
        m for m in module.modules() if hasattr(m, "_copy_state_dict") and hasattr(m, "_update_count")
    ]
    held = [(m, m._copy_state_dict(), m._update_count, m._computed) for m in metrics]
    try:
        yield
    finally:
        for metric, state, count, computed in held:
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, computed


@contextmanager
def _silent(module: LightningModule) -> Iterator[None]:
    """Have the module log nothing."""
    names = ("log", "log_dict")
    held = {name: module.__dict__.get(name) for name in names}
    for name in names:
        module.__dict__[name] = _nothing
    try:
        yield
    finally:
        for name, former in held.items():
            del module.__dict__[name]
            if former is not None:
                module.__dict__[name] = former


def _uncompiled() -> Any:
    """Run what ``torch.compile`` compiled as plain Python, where hooks fire."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _loss_of(output: Any) -> Tensor | None:
    if isinstance(output, dict):
        output = output.get("loss")
    return output if isinstance(output, Tensor) else None
