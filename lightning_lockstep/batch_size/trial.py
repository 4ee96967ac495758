"""One trial of a batch size: real steps on a real batch, on this rank alone, then one word to the others.

A trial runs on the module itself, not on its distributed wrapper, so no gradient is reduced and no rank can
leave another in a collective. What the step itself would say to other ranks is answered on the spot, with
tensors of the size that the real answer would have. After each trial the ranks agree on how it went.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_lockstep._lightning import DummyLogger, LightningModule, Trainer
from lightning_lockstep.batch_size.loaders import BatchPlace
from lightning_lockstep.batch_size.memory.limits import limited_memory
from lightning_lockstep.batch_size.memory.meter import MemoryMeter, MemoryReading
from lightning_lockstep.batch_size.memory.out_of_memory import Failure, attempt, release_memory
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.ddp_reducer import ddp_of
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.snapshot import Snapshot

__all__ = ["TrialOutcome", "TrialRunner", "loss_of", "replaced", "step_arguments"]

_FITS, _FULL, _BROKEN = 0.0, 1.0, 2.0
_ONE_VALUE = "Expected more than 1 value per channel"


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial went, the same on every rank.

    Attributes:
        size: What was tried.
        fits: Whether it fitted on every rank.
        peak: Most memory in use on any rank [bytes], or ``None``.
        limit: Least memory available on any rank [bytes], or ``None``.
        reasons: What ran out, by rank.
    """

    size: int
    fits: bool
    peak: float | None
    limit: float | None
    reasons: dict[int, str]


class TrialRunner:
    """Runs trials of one loop.

    Args:
        trainer: The Trainer, in a loop.
        module: Its module.
        place: Where batches come from.
        steps: Steps of a trial; the second is the first with the optimizer's state in place.
        meter: Reads the memory of this rank, or ``None``.
        communicator: How the ranks agree.

    Ranks: every rank.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        place: BatchPlace,
        *,
        steps: int,
        meter: MemoryMeter | None,
        communicator: Communicator,
    ) -> None:
        self._trainer, self._module, self._place = trainer, module, place
        self._steps, self._meter, self._communicator = steps, meter, communicator
        self._kind = trainer.state.fn.value if trainer.state.fn is not None else "fit"

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Keep the state of the run while the body tries sizes, and put all of it back.

        Ranks: every rank, alone.
        """
        trainer = self._trainer
        kept = Snapshot(
            self._module,
            trainer.strategy.optimizers if self._kind == "fit" else (),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            generators=self._place.generators(),
        )
        try:
            with _cut_off(trainer, self._module):
                yield
        finally:
            kept.restore()

    def run(self, size: int) -> TrialOutcome:
        """Try ``size`` and agree on how it went.

        Args:
            size: Samples per rank.

        Raises:
            BatchSizeError: The step failed on some rank for another reason than memory. That rank raises its
                own error.

        Ranks: all, together; one all-reduce of 24 bytes, and a gather when a rank did not fit.
        """
        if self._meter is not None:
            self._meter.start()
        with limited_memory(self._meter):
            failure = attempt(lambda: self._steps_of(size))
        reading = self._meter.stop() if self._meter is not None else None
        if failure is None and reading is not None:
            failure = self._over_the_limit(reading)
        self._forget_gradients()
        release_memory(collect=failure is not None)
        return self._agree(size, failure, reading)

    def _over_the_limit(self, reading: MemoryReading) -> Failure | None:
        over = self._meter is not None and self._meter.judges and reading.peak is not None
        if not over or reading.peak is None or reading.peak <= reading.limit:
            return None
        return Failure(f"the peak was {(reading.peak - reading.limit) / 2**20:.0f} MiB above the limit", True)

    def _agree(self, size: int, failure: Failure | None, reading: MemoryReading | None) -> TrialOutcome:
        state = _FITS if failure is None else _FULL if failure.out_of_memory else _BROKEN
        limit = float("inf") if reading is None else reading.limit
        # A peak that one rank could not read is read on none: the maximum would be of the others only.
        peak = float("inf") if reading is None or reading.peak is None else reading.peak
        word = torch.tensor([state, peak, -limit], dtype=torch.float64)
        worst, peak, limit = self._communicator.all_reduce(word, "max").tolist()
        read = None if peak == float("inf") else peak
        bound = None if reading is None else -limit
        if worst == _FITS:
            return TrialOutcome(size, True, read, bound, {})
        said = self._communicator.gather((state, failure.summary if failure is not None else ""))
        if worst == _BROKEN:
            self._raise_alike(
                size, failure, {rank: text for rank, (how, text) in enumerate(said) if how == _BROKEN}
            )
        reasons = {rank: text for rank, (how, text) in enumerate(said) if how == _FULL}
        return TrialOutcome(size, False, read, bound, reasons)

    def _raise_alike(self, size: int, failure: Failure | None, said: dict[int, str]) -> None:
        rank, text = min(said.items())
        if all(_ONE_VALUE in each for each in said.values()):
            raise BatchSizeError(
                f"batch size {size} cannot be trained with batch norm, which needs more than one value per"
                " channel. Let the search begin higher (init_val=2) or, where 2 does not fit, use group norm."
            )
        if failure is not None and failure.error is not None:
            raise failure.error
        raise BatchSizeError(
            f"the step failed on rank {rank} with batch size {size}, so every rank stops: {text}"
        )

    def _steps_of(self, size: int) -> None:
        for index in range(self._steps):
            batch = self._on_device(self._place.batch(size))
            if self._kind == "fit":
                self._train(batch, index)
            else:
                self._evaluate(batch, index)

    def _on_device(self, batch: Any) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _train(self, batch: Any, index: int) -> None:
        trainer, module = self._trainer, self._module
        arguments = step_arguments(module.training_step, batch, index)
        if not module.automatic_optimization:
            with trainer.precision_plugin.train_step_context():
                module.training_step(*arguments)
            return
        optimizer = trainer.strategy.optimizers[0]

        def closure() -> Tensor | None:
            with trainer.precision_plugin.train_step_context():
                loss = loss_of(module.training_step(*arguments))
            # After the forward, as the loop does it: the old gradients are part of the peak.
            optimizer.zero_grad()
            if loss is not None:
                trainer.strategy.backward(loss, optimizer)
                return loss.detach()
            return None

        with torch.enable_grad():
            trainer.strategy.optimizer_step(optimizer, closure, model=module)

    def _evaluate(self, batch: Any, index: int) -> None:
        module, precision = self._module, self._trainer.precision_plugin
        step, context = {
            "validate": (module.validation_step, precision.val_step_context),
            "test": (module.test_step, precision.test_step_context),
            "predict": (module.predict_step, precision.predict_step_context),
        }[self._kind]
        module.eval()
        with torch.no_grad(), context():
            step(*step_arguments(step, batch, index))

    def _forget_gradients(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None


def step_arguments(step: Callable[..., Any], batch: Any, index: int) -> list[Any]:
    """Return the arguments of a step: the batch, and its index where the step takes it.

    Ranks: any rank, alone.
    """
    parameters = inspect.signature(step).parameters
    if "dataloader_iter" in parameters:
        raise BatchSizeError(
            "a step that takes dataloader_iter fetches its own batches; none can be made for it"
        )
    several = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return [batch, index] if several else [batch]


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a training step returned.

    Ranks: any rank, alone.
    """
    return output.get("loss") if isinstance(output, dict) else output


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give ``owner`` another attribute ``name`` while the body runs, past any ``__setattr__``.

    Ranks: any rank, alone.
    """
    attributes = vars(owner)
    had, before = name in attributes, attributes.get(name)
    attributes[name] = value
    try:
        yield
    finally:
        if had:
            attributes[name] = before
        else:
            attributes.pop(name, None)


@contextmanager
def _cut_off(trainer: Any, module: LightningModule) -> Iterator[None]:
    """Keep trials from loggers, callbacks and other ranks."""
    strategy, world_size = trainer.strategy, trainer.world_size
    callbacks, loggers = trainer.callbacks, trainer.loggers

    def gathered(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor.expand(world_size, *tensor.shape).clone() if world_size > 1 else tensor

    answers = {
        (strategy, "all_gather"): gathered,
        (strategy, "reduce"): lambda tensor, *args, **kwargs: tensor,
        (strategy, "barrier"): lambda *args, **kwargs: None,
        (strategy, "broadcast"): lambda value, *args, **kwargs: value,
        (strategy, "reduce_boolean_decision"): lambda decision, *args, **kwargs: decision,
        (module, "log"): lambda *args, **kwargs: None,
    }
    for part in module.modules():
        if isinstance(part, nn.SyncBatchNorm):
            answers[part, "forward"] = MethodType(_BatchNorm.forward, part)
    with ExitStack() as stack:
        blocks = getattr(strategy, "block_backward_sync", None)
        wrapped = ddp_of(strategy.model) is not None
        stack.enter_context(blocks() if blocks is not None and wrapped else nullcontext())
        for (owner, name), answer in answers.items():
            stack.enter_context(replaced(owner, name, answer))
        trainer.callbacks, trainer.loggers = [], [DummyLogger()] if loggers else []
        try:
            yield
        finally:
            trainer.callbacks, trainer.loggers = callbacks, loggers
