"""A training step isolated from the run, by Lightning's own loops: nothing is logged, and one rank alone sends nothing.

Four features need it. A trial of a batch size makes whole steps (:func:`run_step`); a replay and an audit run a
recorded step forward and backward (:func:`from_a_state`, :func:`run_forward_backward`); a step split into micro-batches
runs its parts on the module itself (:func:`on_plain_module`). :mod:`lightning_lockstep.steps.snapshot` restores what
they change.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_lockstep._lightning import (
    Closure,
    DummyLogger,
    LightningModule,
    PassThroughProfiler,
    Strategy,
    Trainer,
    _AutomaticOptimization,
    _ManualOptimization,
    is_param_in_hook_signature,
)
from lightning_lockstep.distributed.ddp_reducer import ddp_of
from lightning_lockstep.distributed.local_collectives import local_collectives
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import assigned, do_nothing, replaced
from lightning_lockstep.steps.snapshot import BufferCopies, Gradients, ModuleAttributes, RandomState, restored


@contextmanager
def isolated(
    trainer: Trainer,
    module: LightningModule,  # not wrapped
    *,
    answer_collectives: bool = True,  # False: every rank runs the body, and its collectives are real
    plain_module: bool = True,  # False: the strategy's wrapper or engine makes the steps
) -> Iterator[list[str]]:
    """Keep steps of the body from callbacks, loggers, the profiler and other ranks."""
    # By default the strategy runs the module itself and not its distributed wrapper, so no gradient is reduced.
    # ``self.log`` does nothing. Collectives are answered on this rank, as if every rank held what this rank holds; see
    # :mod:`lightning_lockstep.distributed.local_collectives`. If the body needs data of another rank, it gets an
    # ``UnansweredCollectiveError``.
    strategy, run = trainer.strategy, cast(Any, trainer)  # its annotations leave some of these out
    with ExitStack() as stack:
        if plain_module:
            if hasattr(strategy, "steps_apart"):
                stack.enter_context(strategy.steps_apart(module))
            if ddp_of(strategy.model) is not None:
                stack.enter_context(gradients_apart(module.parameters(), hooks=True))
            stack.enter_context(on_plain_module(strategy))
        stack.enter_context(replaced(module, log=do_nothing))
        if hasattr(strategy, "weights"):
            stack.enter_context(strategy.weights.apart())
        # A toggled optimizer calls this method, which is about reductions between ranks.
        stack.enter_context(replaced(strategy, block_backward_sync=nullcontext))
        if hasattr(strategy, "_model_averager"):  # which averages over all ranks after an optimizer step
            stack.enter_context(replaced(strategy, _model_averager=None))
        for one in strategy._lightning_optimizers:
            # Manual optimization counts the steps of the run in these hooks, and removes them after each step.
            hooks = {"_on_before_step": one._on_before_step, "_on_after_step": one._on_after_step}
            stack.enter_context(replaced(one, **hooks))
        answers: list[str] = []
        if answer_collectives:
            # Its other methods use operations on tensors, which are answered; this one receives an object.
            stack.enter_context(replaced(strategy, broadcast=lambda obj, *args, **kwargs: obj))
            answers = stack.enter_context(local_collectives())
        loggers = [DummyLogger()] if run.loggers else []
        with assigned(run, callbacks=[], loggers=loggers, profiler=PassThroughProfiler()):
            yield answers


@contextmanager
def from_a_state(
    trainer: Trainer,
    module: LightningModule,  # not wrapped
    random: RandomState,
    restore_buffers: Callable[[], None],
    *,
    weight: float = 1.0,  # by which a strategy of this package multiplies the loss
    answer_collectives: bool = True,
) -> Iterator[list[str]]:
    """Isolate the body and start it from a state; restore gradients, their flags, buffers, attributes, random state."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        parts = BufferCopies(module), ModuleAttributes(module), Gradients(module)
        stack.enter_context(restored(RandomState(), *parts))
        random.restore()
        restore_buffers()
        answers = stack.enter_context(isolated(trainer, module, answer_collectives=answer_collectives))
        if (weights := getattr(trainer.strategy, "weights", None)) is not None:
            weights.weight = weight  # `isolated` restores it
        stack.enter_context(torch.enable_grad())
        yield answers


def step_arguments(step: Callable[..., Any], batch: Any, index: int) -> list[Any]:
    """Return the arguments of a step: the batch, and its index if the step takes it."""
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "a step that takes dataloader_iter fetches its own batches: expected one that is given a batch"
        )
    return [batch, index] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else [batch]


def run_step(
    trainer: Trainer,
    module: LightningModule,
    arguments: Sequence[Any],  # of training_step
    batch_idx: int,
    *,
    accumulate: int = 1,  # batches in an optimizer step, which is made after the last of them
) -> None:
    """Run one batch of training by Lightning's own optimization, with every hook of the module."""
    # The accumulation of the run and its count of batches are not used. Schedulers and the counters of the run do not
    # change. This is to be called in :func:`isolated`.
    kwargs: Any = OrderedDict(enumerate(arguments))
    if not module.automatic_optimization:
        _ManualOptimization(trainer).run(kwargs)
        return
    accumulates = (batch_idx + 1) % accumulate != 0
    with (
        replaced(trainer, accumulate_grad_batches=accumulate),
        replaced(trainer.fit_loop, _should_accumulate=lambda: accumulates),
    ):
        _AutomaticOptimization(trainer).run(trainer.optimizers[0], batch_idx, kwargs)


def run_forward_backward(
    trainer: Trainer,
    module: LightningModule,
    step: Callable[[], Any],  # below the distributed wrapper, inside autocast
    *,
    optimizer_steps: int = 1,  # manual optimization ends at this step; earlier ones only run their closure
    around_backward: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,  # given the scaled loss
    place: Any = None,  # of its batch, by the strategy's `place_of`
) -> None:
    """Run a recorded ``training_step`` and its backward by Lightning's closure, in `isolated`; nothing steps."""
    strategy: Any = trainer.strategy
    done = 0
    original: Callable[..., None] = module.backward

    def training_step() -> Any:
        drawing = nullcontext() if place is None else strategy.drawing_at(place)
        with drawing, trainer.precision_plugin.train_step_context():
            output = step()
        if output is None and module.automatic_optimization:
            raise _Stopped
        return output

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with around_backward(loss):
            if loss.requires_grad:
                original(loss, *args, **kwargs)

    def optimizer_step(optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        result = closure()
        done += 1
        if done >= optimizer_steps:
            raise _Stopped
        return result

    with (
        replaced(strategy, training_step=training_step, optimizer_step=optimizer_step),
        replaced(module, backward=backward),
    ):
        try:
            if module.automatic_optimization:
                loop = _AutomaticOptimization(trainer)
                # `training_step` above takes no arguments.
                Closure(loop._make_step_fn(OrderedDict()), loop._make_backward_fn(trainer.optimizers[0]))()
            else:
                _ManualOptimization(trainer).run(OrderedDict())
        except _Stopped:
            pass


@contextmanager
def gradients_apart(parameters: Iterable[nn.Parameter], *, hooks: bool) -> Iterator[None]:
    """Give parameters (whole leaves) separate gradients in the body, of which nothing outside learns."""
    # The parameters stay the same objects with the same values in the same memory. With ``hooks``, those that a program
    # has registered on them are called as usual.
    # DDP's reducer and DeepSpeed's engine are called when autograd accumulates a gradient. Even if nothing is to be
    # reduced, DDP records then which parameters a step has used, and in the first step of a static graph how often.
    with ExitStack() as stack:
        for parameter in dict.fromkeys(parameters):
            other = parameter.detach().requires_grad_(parameter.requires_grad)
            _exchange(parameter, other)
            stack.callback(_exchange, parameter, other)
            if hooks:
                # Setting them makes autograd call them for the memory that the parameter has now.
                held: Any = parameter
                held._backward_hooks = held._backward_hooks
                held._post_accumulate_grad_hooks = held._post_accumulate_grad_hooks
        yield


def _exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the contents of two tensors: memory, gradients and the hooks that wait for these."""
    # ``torch.utils.swap_tensors`` refuses a parameter that DDP refers to.
    torch.clear_autocast_cache()  # which refers to the parameters
    torch._C._swap_tensor_impl(one, other)


def on_plain_module(strategy: Strategy) -> AbstractContextManager[None]:
    """Make the strategy run the LightningModule itself instead of its wrapper in the body."""
    # Whatever the strategy does around the forward of its wrapper, it still does.
    module = strategy.lightning_module
    if module is None or strategy.model is module:
        return nullcontext()
    return assigned(strategy, model=_NotDistributed(module))


class _NotDistributed(nn.Module):
    """Stands for a distributed wrapper, and passes every call on to the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Stopped(Exception):  # noqa: N818  (a signal, no error)
    """Ends a step at the requested optimizer step, or if there is nothing to run backward."""
