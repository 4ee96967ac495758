"""Steps that DeepSpeed's engine makes on one rank alone, to see whether a batch fits into memory.

The engine itself makes the step, with its buckets, its gathered parameters and its optimizer, so that it needs what the
step of the run needs. What it sends is answered on the spot
(:mod:`lightning_lockstep.distributed.local.collectives`), with tensors of the size of the real answer. The parameters
that it gathers are then not the model's, which memory does not notice; see
:class:`~lightning_lockstep.deepspeed.engine_state.EngineState` for how everything becomes what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_lockstep._doors.deepspeed_internals import (
    alone_in_comparison,
    at_first_batch,
    attributes_of_trial,
    largest_bucket,
    modules_in_forward,
    set_accumulation,
    set_sizes,
    set_train_batch_size,
    train_batch_size,
    with_bucket,
)
from lightning_lockstep.deepspeed.configuration.reading import is_given, modern_spelling, section
from lightning_lockstep.deepspeed.engine_state import EngineState
from lightning_lockstep.deepspeed.loss_scale import LossScaleHistory
from lightning_lockstep.steps.patching import replaced

__all__ = ["EngineTrials"]

_NOT_TRIED = {
    "flops_profiler": "it profiles steps, also those of a trial",
    "autotuning": "it searches for a batch size itself",
    "elasticity": "it chooses the batch size itself",
    "hybrid_engine": "its engine is another one",
    "zenflow": "its optimizer runs in a process of its own",
    "data_efficiency": "it changes batches from step to step",
    "curriculum_learning": "it changes batches from step to step",
}


class EngineTrials:
    """What a search for a batch size needs of a strategy with an engine."""

    def __init__(self, strategy: Any, given: Mapping[str, Any]) -> None:
        self._strategy, self._given = strategy, modern_spelling(given)

    @property
    def _engine(self) -> Any:
        return self._strategy.model

    def why_size_is_fixed(self) -> str:
        """Return why the batch size of a run cannot be changed, or nothing."""
        return self._fixed("train_micro_batch_size_per_gpu") or self._fixed("train_batch_size")

    def why_accumulation_is_fixed(self) -> str:
        """Return why the accumulation of a run cannot be changed, or nothing."""
        return self._fixed("gradient_accumulation_steps")

    def _fixed(self, key: str) -> str:
        value = self._given.get(key)
        if not is_given(value):
            return ""
        return (
            f"{key}={value!r} in the config of DeepSpeed fixes it. Write {key}: 'auto' there, or leave it out"
        )

    def why_not_possible(self) -> str:
        """Return why the engine cannot make a step on one rank alone, or nothing."""
        for name, why in _NOT_TRIED.items():
            if section(self._given, name).get("enabled") is True:
                return f"{name} of the config of DeepSpeed: {why}"
        zero = section(self._given, "zero_optimization")
        for name in ("offload_optimizer", "offload_param"):
            if (zero.get(name) or {}).get("device") == "nvme":
                return f"{name} to NVMe: a step writes to files of the run, which cannot be put back"
        if getattr(self._strategy.precision_plugin, "has_accumulated", False):
            return "batches have been accumulated already, and the optimizer has not stepped"
        return ""

    def state(self) -> EngineState:
        """Return all that steps of the engine change, to put back."""
        return EngineState(self._engine, self._strategy.lightning_module, [modules_in_forward()])

    @contextmanager
    def alone(self, *, accumulates: bool) -> Iterator[int]:
        """Let the engine make steps in the body whose collectives are answered on this rank.

        Yields the batches of an optimizer step. Gradients of two are accumulated where the run accumulates:
        more of them need no more memory.
        """
        from deepspeed import checkpointing

        engine, plugin = self._engine, self._strategy.precision_plugin
        passes = 2 if accumulates or engine.gradient_accumulation_steps() > 1 else 1
        with ExitStack() as stack:
            # It compares the order of the modules with rank 0's, which is not there.
            comparing, values = alone_in_comparison()
            stack.enter_context(replaced(comparing, **values))
            if hasattr(plugin, "history"):
                stack.enter_context(replaced(plugin, history=LossScaleHistory(), has_accumulated=False))
            stack.enter_context(replaced(engine, **at_first_batch()))
            for holder, values in self._values_of_trials(passes):
                stack.enter_context(replaced(holder, **values))
            whole = train_batch_size(engine)
            set_accumulation(engine, passes)
            try:
                yield passes
            finally:
                set_train_batch_size(engine, whole)
                checkpointing.reset()  # activations that a backward, which may not have come so far, would take back

    def _values_of_trials(self, passes: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Return objects of the engine with values of attributes that they have already, for trials."""
        optimizer = self._engine.optimizer
        wanted = attributes_of_trial(optimizer, passes)
        largest = largest_bucket(optimizer)
        if largest is not None and self._counts_what_is_touched():
            numel = sum(
                getattr(p, "ds_shape", p.shape).numel() for p in self._strategy.lightning_module.parameters()
            )
            wanted.append((optimizer, with_bucket(min(int(largest), numel))))
        for holder, values in wanted:
            if holder is not None and set(values) <= set(vars(holder)):
                yield holder, values

    def _counts_what_is_touched(self) -> bool:
        """Return whether the part of a bucket that a small model leaves empty takes no memory."""
        if self._strategy.root_device.type != "cpu":
            return False
        import resource

        return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY

    def take_sizes(self, *, batch_size: int, accumulate: int) -> None:
        """Let the engine go on with other sizes, by which it counts samples and knows its optimizer steps."""
        engine = self._engine
        set_sizes(engine, batch_size=batch_size, accumulate=accumulate)
        self._strategy.config |= {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": accumulate,
            "train_batch_size": train_batch_size(engine),
        }
