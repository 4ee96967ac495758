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
from types import SimpleNamespace
from typing import Any

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
        from deepspeed.runtime.zero import parameter_offload

        return EngineState(
            self._engine, self._strategy.lightning_module, [parameter_offload.FWD_MODULE_STACK]
        )

    @contextmanager
    def alone(self, *, accumulates: bool) -> Iterator[int]:
        """Let the engine make steps in the body whose collectives are answered on this rank.

        Yields the batches of an optimizer step. Gradients of two are accumulated where the run accumulates:
        more of them need no more memory.
        """
        from deepspeed import checkpointing
        from deepspeed.runtime.zero import utils

        engine, plugin = self._engine, self._strategy.precision_plugin
        passes = 2 if accumulates or engine.gradient_accumulation_steps() > 1 else 1
        with ExitStack() as stack:
            # It compares the order of the modules with rank 0's, which is not there.
            stack.enter_context(
                replaced(utils, dist=SimpleNamespace(get_rank=lambda: 0, broadcast=lambda *a, **k: None))
            )
            if hasattr(plugin, "history"):
                stack.enter_context(replaced(plugin, history=LossScaleHistory(), has_accumulated=False))
            stack.enter_context(replaced(engine, micro_steps=0))
            for holder, values in self._values_of_trials(passes):
                stack.enter_context(replaced(holder, **values))
            whole = engine.train_batch_size()
            engine.set_train_batch_size(
                engine.train_micro_batch_size_per_gpu() * passes * engine.dp_world_size
            )
            try:
                yield passes
            finally:
                engine.set_train_batch_size(whole)
                checkpointing.reset()  # activations that a backward, which may not have come so far, would take back

    def _values_of_trials(self, passes: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Return objects of the engine with values of attributes that they have already, for trials."""
        optimizer = self._engine.optimizer
        wanted: list[tuple[Any, dict[str, Any]]] = [
            (optimizer, {"gradient_accumulation_steps": passes}),
            # A step that is skipped for an overflow would not show what the optimizer needs.
            (getattr(optimizer, "loss_scaler", None), {"cur_scale": 1.0}),
        ]
        largest = getattr(optimizer, "reduce_bucket_size", None)
        if largest is not None and self._counts_what_is_touched():
            numel = sum(
                getattr(p, "ds_numel", p.numel()) for p in self._strategy.lightning_module.parameters()
            )
            wanted.append((optimizer, {"reduce_bucket_size": min(int(largest), numel)}))
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
        engine.set_train_micro_batch_size(batch_size)
        engine.set_train_batch_size(batch_size * accumulate * engine.dp_world_size)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = accumulate
        self._strategy.config |= {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": accumulate,
            "train_batch_size": engine.train_batch_size(),
        }
