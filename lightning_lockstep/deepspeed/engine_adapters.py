"""What DeepSpeed's engines keep private: one class for each way in which an optimizer keeps gradients and state.

`adapter_of` finds the class for an engine. DeepSpeed has public functions for whole gradients, which gather them from
all ranks, and none for its loss scale, for a skipped step or for the state that other ranks have saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.capabilities import EngineGradients


@dataclass(frozen=True)
class StepOutcome:
    """What an engine says of its last optimizer step."""

    skipped: bool | None  # weights stayed; None: only a scale that falls can tell (torch's scaler)
    scale: float | None = None  # after the step; None: none is used (bf16)
    floor: float | None = None  # smallest scale (min_loss_scale) of a scale that adapts itself


class EngineAdapter(EngineGradients):
    """An engine whose optimizer is none that is known here: one that does not train, for example."""

    mark = ""  # the attribute by which an optimizer is known
    keeps_gradients = False  # whether it is known where

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.history: Any = None  # of the loss scale, if somebody keeps it

    def set_counters(self, *, steps: int, skipped: int, samples: int | None, ranks: int) -> None:
        """Go on counting from a checkpoint that so many ranks have written."""
        self.engine.global_steps, self.engine.skipped_steps = steps, skipped
        self.engine.global_samples = steps * self.engine.train_batch_size() if samples is None else samples
        self.engine.loaded_checkpoint_dp_world_size = ranks

    # the loss scale

    def outcome(self) -> StepOutcome | None:
        """Return what is known of the last optimizer step; ``None``: nothing checks or scales gradients."""
        overflow = getattr(self.optimizer, "overflow", None)
        scaler = getattr(self.engine, "torch_autocast_z0_gradscaler", None)
        scaler = scaler or getattr(self.optimizer, "torch_autocast_gradscaler", None)
        if scaler is not None:  # it keeps the outcome of a step to itself; ZeRO may have skipped it before
            return StepOutcome(True if overflow else None, float(scaler.get_scale()))
        if overflow is None:
            return None
        if getattr(self.optimizer, "custom_loss_scaler", False):
            return StepOutcome(bool(overflow), float(self.optimizer.external_loss_scale))
        return StepOutcome(bool(overflow), *self.scale_and_floor())

    def scale_and_floor(self) -> tuple[float | None, float | None]:
        """Return the loss scale and the smallest that it falls to; ``None`` if there is none."""
        return None, None

    # gradients of this rank, and steps that are skipped, as OverflowDetector needs them

    def steps_now(self) -> bool:
        """Return whether the engine's next ``step()`` changes weights, and not only counts an accumulated batch."""
        return bool(self.engine.is_gradient_accumulation_boundary())

    def gradients(self) -> list[Tensor]:
        """Return what this rank holds of the gradients accumulated so far; the same tensors at every step if it can."""
        return list(self.own_gradients())

    def own_gradients(self) -> Iterable[Tensor]:
        return ()

    def skip_step(self, optimizer: Any = None) -> None:
        """Have the engine skip its next optimizer step as after an overflow that it found itself."""
        # Weights and the optimizer's state stay, gradients are let go, the skip is counted, a dynamic loss scale falls.
        if self.history is not None:
            self.history.expect_skip()
        self.skip_once()

    def skip_once(self) -> None:
        raise NotImplementedError

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor (``min_loss_scale``, else 0); ``None`` if the loss is not scaled."""
        outcome = self.outcome()
        return None if outcome is None or outcome.scale is None else (outcome.scale, outcome.floor or 0.0)

    def why_skips_are_too_many(self) -> str | None:
        """Return what is not ordinary about the steps skipped so far; the same on every rank."""
        return None if self.history is None else self.history.verdict()

    # the sizes of a batch, and trials of others

    @contextmanager
    def accumulating(self, passes: int) -> Iterator[None]:
        """Let the engine accumulate so many batches for a step in the body."""
        engine, samples = self.engine, self.engine.train_batch_size()
        engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * passes * engine.dp_world_size)
        try:
            yield
        finally:
            engine.set_train_batch_size(samples)

    def set_sizes(self, *, batch_size: int, accumulate: int) -> None:
        self.engine.set_train_micro_batch_size(batch_size)
        self.engine.set_train_batch_size(batch_size * accumulate * self.engine.dp_world_size)

    def values_of_trial(
        self, passes: int, largest_bucket: int | None
    ) -> list[tuple[Any, dict[str, Any]]]:  # objects and attributes of theirs
        """Return what the engine needs for steps on this rank alone, with as many batches in each."""
        from deepspeed.runtime.zero import utils

        # DeepSpeed compares the order of the modules with rank 0's, which does not take part.
        alone = SimpleNamespace(get_rank=lambda: 0, broadcast=lambda *a, **k: None)
        return [
            (utils, {"dist": alone}),
            (self.engine, {"micro_steps": 0}),
        ]

    # what a checkpoint has

    def refresh_copies(self) -> None:
        """Make the float32 copies of the optimizer those of the weights, if it has copies."""
        refresh = getattr(self.optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()

    def set_flags(self, overflow: bool, scaler_state: Mapping[str, Any]) -> None:
        """Take the last step for one that was skipped or not, and a loss scale as it was."""
        self.optimizer.overflow = overflow
        scaler = getattr(self.optimizer, "loss_scaler", None)
        for name, value in scaler_state.items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


class WholeFloat32(EngineAdapter):
    """Stage 0 in float32: the optimizer is one of torch's."""

    keeps_gradients = True

    def own_gradients(self) -> Iterable[Tensor]:
        return _gradients_of(group["params"] for group in self.optimizer.param_groups)

    def skip_once(self) -> None:
        """Take the gradients away, without which nothing changes; torch's loss scaler needs to see bad ones."""
        scaled = getattr(self.engine, "torch_autocast_z0_gradscaler", None) is not None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not scaled:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach().fill_(float("nan"))


class Whole16(EngineAdapter):
    """Stage 0 in 16 bits."""

    mark = "overflow_checker"
    keeps_gradients = True

    def scale_and_floor(self) -> tuple[float | None, float | None]:
        config = self.optimizer.loss_scale_config
        if not config.use_grad_scaling:
            return None, None
        return float(config.cur_scale), float(config.min_loss_scale) if config.dynamic_loss_scale else None

    def own_gradients(self) -> Iterable[Tensor]:
        return _gradients_of(self.optimizer.fp16_groups)

    def skip_once(self) -> None:
        _find_overflow_once(self.optimizer.overflow_checker, "has_overflow", "check", "check_using_norm")


class Zero(EngineAdapter):
    """What the optimizers of stages 1 to 3 have in common."""

    mark = "loss_scaler"

    def scale_and_floor(self) -> tuple[float | None, float | None]:
        scaler = self.optimizer.loss_scaler
        if self.optimizer.dtype != torch.float16:
            return None, None  # the scaler that is there does nothing
        return float(scaler.cur_scale), float(scaler.min_scale) if scaler.dynamic else None

    def set_sizes(self, *, batch_size: int, accumulate: int) -> None:
        super().set_sizes(batch_size=batch_size, accumulate=accumulate)
        self.optimizer.gradient_accumulation_steps = accumulate

    def values_of_trial(self, passes: int, largest_bucket: int | None) -> list[tuple[Any, dict[str, Any]]]:
        values = {"gradient_accumulation_steps": passes}
        if largest_bucket is not None:
            values["reduce_bucket_size"] = min(int(self.optimizer.reduce_bucket_size), largest_bucket)
        # A step that is skipped for an overflow would not show what the optimizer needs.
        unscaled = {"cur_scale": 1.0}
        return [
            *super().values_of_trial(passes, largest_bucket),
            (self.optimizer, values),
            (self.optimizer.loss_scaler, unscaled),
        ]


class FlatGroups(EngineAdapter):
    """Each group of parameters is one vector, of which every rank has a part."""

    groups_name = ""  # the attribute that has the parameters, by groups

    def parameter_groups(self) -> list[list[Any]]:
        return list(getattr(self.optimizer, self.groups_name))

    def vectors(self) -> list[list[Tensor]]:
        """Return the vectors of each group, which torch's optimizer has for parameters."""
        return [list(group["params"]) for group in self.optimizer.optimizer.param_groups]

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of torch's optimizer, and let each parameter find its own, as after a first step."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state as link

        optimizer = self.optimizer.optimizer
        optimizer.load_state_dict(state)
        for parameters, (vector,) in zip(self.parameter_groups(), self.vectors(), strict=True):
            link(parameters, vector, optimizer.state)

    def range_of(self, parameter: Any, rank: int) -> tuple[int, int]:
        """Return start and length of the values of a parameter that `write` takes: all, or none without a part here."""
        return 0, parameter.numel() if parameter._hp_mapping is not None else 0

    def write(self, parameter: Any, key: str | None, values: Tensor) -> None:
        """Write this rank's part of a float32 weight, or of the state of that key."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if key is None:
            safe_set_full_fp32_param(parameter, values)
        else:
            safe_set_full_optimizer_state(parameter, values, key)


class Bf16(FlatGroups):
    """Stage 1 in bfloat16 with gradients in float32."""

    mark = "fp32_groups_gradients"
    groups_name = "bf16_groups"
    keeps_gradients = True

    def own_gradients(self) -> Iterable[Tensor]:
        return (gradient for group in self.optimizer.fp32_groups_gradients for gradient in group)

    def skip_once(self) -> None:
        optimizer = self.optimizer

        def step(*args: Any, **kwargs: Any) -> None:
            del optimizer.step  # that of the class is there again
            if hasattr(optimizer, "overflow"):  # releases before 0.19.8 would never take it back
                optimizer.overflow = True
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()

        optimizer.step = step


class Stages1And2(FlatGroups, Zero):
    """Stages 1 and 2."""

    mark = "averaged_gradients"
    groups_name = "bit16_groups"
    keeps_gradients = True

    def own_gradients(self) -> Iterator[Tensor]:
        """Yield the gradients as reduced before a step, else as accumulated so far."""
        # With offload the optimizer looks at them itself before a step, on their way to the host.
        if self.optimizer.cpu_offload:
            return
        reduced = [group for group in self.optimizer.averaged_gradients.values() if group]
        for group in reduced:
            flat = getattr(group, "flat_partition", None)
            yield from (g for g in ([flat] if flat is not None else group) if g is not None)
        if reduced:
            return
        for kept in self.optimizer.all_grad_tensors.values():
            yield from (g for g in kept or [] if g is not None)
        for parameter in (parameter for group in self.optimizer.bit16_groups for parameter in group):
            gradients = (getattr(parameter, name, None) for name in ("grad", "grad_accum"))
            yield from (g for g in gradients if g is not None)

    def known_bad(self) -> bool:
        return bool(getattr(self.optimizer, "local_overflow", False))  # only with offload

    def skip_once(self) -> None:
        looks = self.optimizer.check_grad_overflow
        self.optimizer.check_grad_overflow = True
        _find_overflow_once(self.optimizer, "check_overflow", overflow=True, check_grad_overflow=looks)

    def load_state(self, state: dict[str, Any]) -> None:
        """As for others; with ``round_robin_gradients`` a vector has another order than its group."""
        optimizer = self.optimizer
        if optimizer.round_robin_gradients:
            # DeepSpeed 0.19.8 links parameters with the places that the vector really has only if it is padded.
            padding = optimizer.round_robin_bit16_padding
            optimizer.round_robin_bit16_padding = [[1]] * len(optimizer.bit16_groups)
            try:
                optimizer._link_all_hp_params()
            finally:
                optimizer.round_robin_bit16_padding = padding
        super().load_state(state)


class Stage3(Zero):
    """Stage 3: each parameter is divided among the ranks."""

    mark = "grad_partitions_flat_buffer"
    keeps_gradients = True

    def own_gradients(self) -> Iterable[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def skip_once(self) -> None:
        _find_overflow_once(self.optimizer, "_overflow_check_and_loss_scale_update", overflow=True)

    def parameter_groups(self) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in self.optimizer.optimizer.param_groups]
        for number, parameters in enumerate(self.optimizer.fp16_groups):
            found[self.optimizer.sub_group_to_group_id[number]] += parameters
        return found

    def vectors(self) -> list[list[Tensor]]:
        """Return the vectors of each group, which torch's optimizer has for parameters while it steps."""
        self.optimizer._set_fp32_optimizer_param_groups()
        found = [list(group["params"]) for group in self.optimizer.optimizer.param_groups]
        self.optimizer._clear_fp32_optimizer_param_groups()
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of torch's optimizer."""
        self.optimizer._set_fp32_optimizer_param_groups()
        try:
            self.optimizer.optimizer.load_state_dict(state)
        finally:
            self.optimizer._clear_fp32_optimizer_param_groups()

    def range_of(self, parameter: Any, rank: int) -> tuple[int, int]:
        """Return start and length of the values of a parameter that `write` takes: those of this rank."""
        length = parameter.ds_tensor.numel()
        return rank * length, length

    def write(self, parameter: Any, key: str | None, values: Tensor) -> None:
        """Write this rank's part of a float32 weight, or of the state of that key."""
        from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

        if key is None:
            safe_set_local_fp32_param(parameter, values)
        else:
            safe_set_local_optimizer_state(parameter, values, key)


def adapter_of(engine: Any) -> EngineAdapter:
    """Return what an engine is seen through, by what its optimizer has."""
    for kind in (Stage3, Stages1And2, Bf16, Whole16, Zero):
        if hasattr(engine.optimizer, kind.mark):
            return kind(engine)
    return (WholeFloat32 if isinstance(engine.optimizer, torch.optim.Optimizer) else EngineAdapter)(engine)


def gradients_of(engine: Any, history: Any = None) -> EngineAdapter:
    """Return what an engine is seen through by OverflowDetector, with the history of its loss scale."""
    adapter = adapter_of(engine)
    adapter.history = history
    if not adapter.keeps_gradients:
        raise ConfigurationError(
            f"OverflowDetector does not know where {type(engine.optimizer).__name__} of this DeepSpeed keeps gradients."
            " Use DeepSpeed 0.19, another stage of ZeRO, or strategy='lockstep_ddp' to find the overflow."
        )
    return adapter


def _gradients_of(groups: Iterable[Iterable[Any]]) -> Iterator[Tensor]:
    return (parameter.grad for group in groups for parameter in group if parameter.grad is not None)


def _find_overflow_once(owner: Any, *methods: str, **then: Any) -> None:
    """Let the methods that look for an overflow report one, once, and give the owner these attributes then."""

    def found(*args: Any, **kwargs: Any) -> bool:
        for name in methods:
            delattr(owner, name)  # those of the class are there again
        for name, value in then.items():
            setattr(owner, name, value)
        return True

    for name in methods:
        setattr(owner, name, found)
