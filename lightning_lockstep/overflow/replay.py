"""A bad batch run again with the same weights and random numbers, and the remedy that lets it pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.numerics.precision import run_in_fp32, runs_in_fp32, undo_run_in_fp32
from lightning_lockstep.numerics.statistics import module_names
from lightning_lockstep.overflow.frames import FrameRecorder, Producer
from lightning_lockstep.steps.capabilities import capabilities_of
from lightning_lockstep.steps.isolated_step import from_a_state, run_forward_backward
from lightning_lockstep.steps.patching import put_in_place
from lightning_lockstep.steps.snapshot import BufferCopies, RandomState

# -- Which modules have to run in float32, found by trying them on the batch that failed --

_ROUNDS = 16


@dataclass(frozen=True)
class Remedy:
    modules: tuple[str, ...] = ()  # to run in float32; empty: that does not help
    tried: bool = False  # the batch was replayed with them in float32 and passed
    text: str = ""  # advice

    def lines(self) -> list[str]:
        lines = []
        if self.modules:
            names = ", ".join(f'"{name}"' for name in self.modules)
            tried = "the batch was run again this way and passed" if self.tried else "not tried"
            lines += [
                f"Remedy ({tried}):",
                f"    in Python:            FP32Modules([{names}])",
                f"    on the command line:  'callbacks.fp32_modules.modules=[{','.join(self.modules)}]'",
            ]
        if self.text:
            lines.append(f"Advice: {self.text}")
        return lines


def search(root: nn.Module, first: Producer, run: Callable[[], Producer | None]) -> Remedy | None:
    """Find modules which, run in float32, let the batch pass; ``None`` if float32 does not help."""
    # Begins with the module that produced the first bad value. If its output is too large for the dtype to which
    # it is cast back, the module around it is tried; if another module fails next, that one is added. Each
    # attempt is one replay, 16 at most: ``run`` returns what produces the first bad value now.
    by_name = {name: module for module, name in module_names(root).items()}
    chosen: list[str] = []
    candidate = first.module
    for _ in range(_ROUNDS):
        if not candidate or candidate not in by_name:
            return None
        chosen = [name for name in chosen if not _inside(name, candidate)] + [candidate]
        with _in_float32([by_name[name] for name in chosen]):
            now = run()
        if now is None:
            return Remedy(tuple(_shorter(chosen, by_name, run)), tried=True)
        if now.kind in ("weight", "batch"):
            return None
        # Still inside a module that runs in float32: its result does not fit the dtype to which it is cast back.
        stuck = next((name for name in chosen if _inside(now.module, name)), None)
        candidate = stuck.rpartition(".")[0] if stuck else now.module
    return None


def _shorter(chosen: list[str], by_name: dict[str, nn.Module], run: Callable[[], Producer | None]) -> list[str]:
    """Return the one module that holds all the chosen ones, if it does as well as they do."""
    parents = {name.rpartition(".")[0] for name in chosen}
    parent = next(iter(parents))
    if len(chosen) == 1 or len(parents) > 1 or parent not in by_name or not parent:
        return chosen
    with _in_float32([by_name[parent]]):
        return [parent] if run() is None else chosen


def advice(producer: Producer) -> str:
    """Return advice as text, for when float32 modules cannot or do not help."""
    if producer.kind == "batch":
        return "Check the samples named above, and the code that prepares them."
    if producer.kind == "weight":
        return (
            "An earlier step made the weights bad: lower the learning rate, raise the optimizer's eps, or use"
            " action='skip' from the start."
        )
    meant = ""
    if producer.only_inf:
        names = ", ".join(repr(name) for name in producer.values)
        meant = f"If it may be infinite, such as in a mask, write OverflowDetector(allow_inf=[{names}]). "
    other = "look for a logarithm or division of zero, or a mask that hides a whole row"
    if producer.low_precision:
        wider = "32-true" if producer.remarks.startswith("bfloat16") else "bf16-mixed or 32-true"
        other = f"train in {wider}"
    return f"{meant}Check its inputs (frames above), clip gradients, lower the learning rate, or {other}."


def _inside(name: str, container: str) -> bool:
    return name == container or name.startswith(f"{container}.")


@contextmanager
def _in_float32(modules: Sequence[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            if not runs_in_fp32(module):
                stack.callback(undo_run_in_fp32, run_in_fp32(module))
        yield


#: Advice if the value was made in ``training_step``, or in the module's own backward.
OUTSIDE = (
    "Call detect_overflow(tensor, 'name') of this package after lines of training_step: the next replay names the"
    " first tensor that is bad."
)

# -- Replaying one batch exactly as it was: same weights, same buffers, same random numbers --
# A :class:`StepRecord` is made at the very start of ``training_step``, below DDP and inside autocast, so
# that it holds what the model was given. It keeps references and a few small copies, never an activation.


@dataclass(frozen=True)
class Occasion:
    """Where in the run a step began."""

    epoch: int  # from 0
    step: int  # ``trainer.global_step``
    batch_number: int  # from 0, over all epochs
    batch_idx: int  # from 0, in the epoch

    def __str__(self) -> str:
        return f"epoch {self.epoch}, batch {self.batch_idx}, step {self.step}"


@dataclass
class StepRecord:
    """What it takes to replay one ``training_step``."""

    function: Callable[..., Any]  # the ``training_step`` itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState  # at the start of the step
    buffers: BufferCopies  # at the start of the step
    occasion: Occasion
    # Detached, as it went into the backward; None before that, or if it does not count.
    loss: Tensor | None = None
    weight: float = 1.0  # the loss was multiplied by it
    optimizer_steps: int = 0  # that the step has begun so far (several in manual optimization)
    activation_flag: Tensor | None = None  # on the device: 0, or nan if one was bad; None: unchecked
    made_gradients_bad: bool = False  # they were good before, and no optimizer has stepped since
    notes: list[str] = field(default_factory=list)  # for the report
    place: Any = None  # what its random numbers and norms follow; None: the rank's own
    device_seed: int | None = None  # of the random numbers that a strategy keeps for its devices
    made_nan: bool = False  # the detector made the gradients nan, to tell all ranks


def is_divided(trainer: Trainer) -> bool:
    """Return whether each rank has a part of the parameters, so that all must replay a step together."""
    return capabilities_of(trainer.strategy).replays == "together"


def replay(
    trainer: Trainer,
    module: LightningModule,
    record: StepRecord,
    recorder: FrameRecorder,
    *,
    answer_collectives: bool,  # on this rank alone; otherwise all ranks must replay now
) -> None:
    """Run the recorded step again under a recorder, and leave no trace of it."""
    # DDP is bypassed, so nothing is reduced; nothing is logged; no optimizer steps. Costs one forward and one
    # backward with hooks, and a second set of gradients while it runs.
    recorder.alone = answer_collectives
    # A strategy that divides the parameters gathers them by hooks on calls of the module.
    step = partial(_called_by, module, record.function) if recorder.divided else record.function
    with ExitStack() as stack:
        strategy: Any = trainer.strategy
        if record.device_seed is not None:
            stack.callback(strategy.set_device_seed, strategy.device_seed())
            strategy.set_device_seed(record.device_seed)
        began = from_a_state(
            trainer,
            module,
            record.random,
            record.buffers.restore,
            weight=record.weight,
            answer_collectives=answer_collectives,
        )
        answers = stack.enter_context(began)
        stack.enter_context(recorder.recording())
        recorder.check_batch(record.args[0] if record.args else None)
        run_forward_backward(
            trainer,
            module,
            partial(step, *record.args, **record.kwargs),
            optimizer_steps=record.optimizer_steps,
            around_backward=recorder.backward,
            place=record.place,
        )
        recorder.finish()
    recorder.answered = len(answers)


def _called_by(module: LightningModule, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function in the place of ``module.forward``, once."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return function(*args, **kwargs)

    put_back = put_in_place(module, "forward", forward)
    return module(*args, **kwargs)
