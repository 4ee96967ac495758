"""What DeepSpeed's engines keep private: one class for each way in which an optimizer keeps gradients and state.

`adapter_of` finds the class for an engine. DeepSpeed has public functions for whole gradients, which gather them from
all ranks, and none for its loss scale, to have a step skipped, or for the state that other ranks have saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.capabilities import StepGradients

#: Part of a layout: the names of parameters, by groups, as their values follow each other.
ORDER = "order of parameters in the optimizer"


@dataclass(frozen=True)
class StepOutcome:
    """What an engine says of its last optimizer step."""

    skipped: bool | None  # weights stayed; None: only a scale that falls can tell (torch's scaler)
    scale: float | None = None  # after the step; None: none is used (bf16)
    floor: float | None = None  # smallest scale (min_loss_scale) of a scale that adapts itself


class EngineAdapter(StepGradients):
    """The base of the classes below; itself for an optimizer that none of them knows, or for none."""

    divided = True
    mark = ""  # the attribute by which an optimizer is known
    groups_name = ""  # the attribute with the trained parameters, by groups, in their order

    def __init__(self, engine: Any) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.history: Any = None  # of the loss scale, if somebody keeps it

    @property
    def torch_optimizer(self) -> Any:
        """The optimizer that DeepSpeed's own has inside, or that is there without one."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # -- the loss scale --

    def outcome(self) -> StepOutcome | None:
        """Return what is known of the last optimizer step; ``None``: nothing checks or scales gradients."""
        overflow = getattr(self.optimizer, "overflow", None)
        scaler = getattr(self.engine, "torch_autocast_z0_gradscaler", None)
        scaler = scaler or getattr(self.optimizer, "torch_autocast_gradscaler", None)
        if scaler is not None:  # it does not tell whether it has skipped the step; ZeRO may have before it
            return StepOutcome(True if overflow else None, float(scaler.get_scale()))
        if overflow is None:
            return None
        if not self.engine.fp16_enabled():
            return StepOutcome(bool(overflow))  # a scaler that is there does nothing
        return StepOutcome(bool(overflow), float(self.optimizer.loss_scale), self.floor())

    def floor(self) -> float | None:
        """Return the smallest loss scale, if it adapts itself."""
        return None

    # -- gradients of this rank, and steps that are skipped, as OverflowDetector needs them --

    def steps_now(self) -> bool:
        return bool(self.engine.is_gradient_accumulation_boundary())

    def gradients(self, optimizer: Any = None) -> list[Tensor]:
        """Return what this rank holds of the gradients accumulated so far; the same tensors at every step if it can."""
        parameters = [parameter for group in self.parameter_groups() for parameter in group]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def skip_step(self, optimizer: Any = None) -> None:
        """Have the engine skip its next optimizer step as after an overflow that it found itself."""
        # Weights and the optimizer's state stay, gradients are let go, the skip is counted, a dynamic loss scale falls.
        if self.history is not None:
            self.history.expects_skip = True
        self.skip_once()

    def skip_once(self) -> None:
        raise NotImplementedError

    def loss_scale(self) -> tuple[float, float] | None:
        """Return the loss scale and its floor (``min_loss_scale``, else 0); ``None`` if the loss is not scaled."""
        outcome = self.outcome()
        return None if outcome is None or outcome.scale is None else (outcome.scale, outcome.floor or 0.0)

    def why_skips_are_too_many(self) -> str | None:
        return None if self.history is None else self.history.verdict()

    # -- the sizes of a batch, and trials of others --

    def set_sizes(self, *, batch_size: int, accumulate: int) -> None:
        self.engine.set_train_micro_batch_size(batch_size)
        self.engine.set_train_batch_size(batch_size * accumulate * self.engine.dp_world_size)

    def set_for_trial(self, passes: int) -> None:
        """Set what steps on this rank alone need, with ``passes`` batches in each."""
        self.engine.micro_steps = 0
        self.set_sizes(batch_size=self.engine.train_micro_batch_size_per_gpu(), accumulate=passes)

    # -- what a checkpoint has --

    def refresh_copies(self) -> None:
        refresh = getattr(self.optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()

    def layout(self) -> dict[str, Any]:
        """Return what the positions of values in the files of a checkpoint depend on."""
        engine = self.engine
        stage, names = engine.zero_optimization_stage(), engine.param_names
        groups = [[names[parameter] for parameter in group] for group in self.parameter_groups()]
        halves = {"bf16": engine.bfloat16_enabled(), "fp16": engine.fp16_enabled()}
        layout = {"stage": stage, "precision": next((name for name, on in halves.items() if on), "float32")}
        ranks = {"number of ranks": engine.dp_world_size} if stage or engine.has_moe_layers else {}
        return {**layout, **ranks, ORDER: groups}

    def parameter_groups(self) -> list[list[Any]]:
        """Return the parameters that are trained, by groups, in their order in the files."""
        return list(getattr(self.optimizer, self.groups_name, []))

    def set_counters(self, saved: Mapping[str, Any]) -> None:
        engine, steps = self.engine, saved["global_steps"]
        engine.global_steps, engine.skipped_steps = steps, saved["skipped_steps"]
        engine.global_samples = saved.get("global_samples", steps * engine.train_batch_size())
        engine.loaded_checkpoint_dp_world_size = saved["dp_world_size"]
        if engine.random_ltd_enabled() and saved.get("random_ltd"):
            engine.random_ltd_scheduler.load_state_dict(saved["random_ltd"])

    def set_flags(self, overflow: bool, scaler_state: Mapping[str, Any]) -> None:
        """Note whether the last step was skipped, and go on with a loss scale that adapts itself."""
        self.optimizer.overflow = overflow
        scaler = getattr(self.optimizer, "loss_scaler", None)
        if getattr(scaler, "dynamic", False) and scaler_state.get("dynamic"):  # float16 in both runs
            for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"):
                setattr(scaler, name, scaler_state[name])

    @contextmanager
    def own_settings(self) -> Iterator[None]:
        """Let DeepSpeed load a checkpoint in the body, and keep the clipping and the kind of loss scale of this run."""
        optimizer = self.optimizer
        names = [one for one in ("clip_grad", "loss_scaler", "dynamic_loss_scale") if one in vars(optimizer)]
        kept = {name: getattr(optimizer, name) for name in names}
        yield
        loaded = getattr(optimizer, "loss_scaler", None)
        for name, value in kept.items():
            setattr(optimizer, name, value)
        if loaded is not None:
            self.set_flags(optimizer.overflow, vars(loaded))


class WholeFloat32(EngineAdapter):
    """Stage 0 in float32: the optimizer is one of torch's."""

    def parameter_groups(self) -> list[list[Any]]:
        return [group["params"] for group in self.optimizer.param_groups]

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
    groups_name = "fp16_groups"

    def floor(self) -> float | None:
        config = self.optimizer.loss_scale_config
        return float(config.min_loss_scale) if config.dynamic_loss_scale else None

    def skip_once(self) -> None:
        _find_overflow_once(self.optimizer.overflow_checker, "has_overflow", "check", "check_using_norm")


class Zero(EngineAdapter):
    """What the optimizers of stages 1 to 3 have in common."""

    mark = "loss_scaler"

    def floor(self) -> float | None:
        scaler = self.optimizer.loss_scaler
        return float(scaler.min_scale) if scaler.dynamic else None

    def set_sizes(self, *, batch_size: int, accumulate: int) -> None:
        super().set_sizes(batch_size=batch_size, accumulate=accumulate)
        self.optimizer.gradient_accumulation_steps = accumulate

    def set_for_trial(self, passes: int) -> None:
        super().set_for_trial(passes)
        # The memory limit of a CPU counts a whole bucket, but a run touches only what its gradients fill.
        if self.engine.device.type == "cpu":
            parameters = self.engine.module.parameters()
            numel = sum(getattr(parameter, "ds_shape", parameter.shape).numel() for parameter in parameters)
            self.optimizer.reduce_bucket_size = min(int(self.optimizer.reduce_bucket_size), numel)
        # A step that is skipped for an overflow would not show what the optimizer needs.
        self.optimizer.loss_scaler.cur_scale = 1.0


#: A vector that torch's optimizer has, with the parameters that it holds: of each where its piece begins in the
#: parameter and in the vector, and how long it is.
Pieces = tuple[Tensor, list[tuple[Any, int, int, int]]]


class FlatGroups(EngineAdapter):
    """Each group of parameters is one vector, of which every rank has a part."""

    def pieces(self, rank: int) -> list[list[Pieces]]:
        """Return what is in the vectors of this rank, by groups."""
        found: list[list[Pieces]] = []
        # Padding after each parameter, if DeepSpeed aligns them.
        gaps = getattr(self.optimizer, "round_robin_bit16_padding", None)
        for number, group in enumerate(self.parameter_groups()):
            (vector,) = self.torch_optimizer.param_groups[number]["params"]
            found.append([(vector, [])])
            start = -rank * vector.numel()  # of the parameter, in the vector
            for parameter, gap in zip(group, gaps[number] if gaps else [0] * len(group), strict=True):
                first, end = max(start, 0), min(start + parameter.numel(), vector.numel())
                if first < end:
                    found[-1][0][1].append((parameter, first - start, first, end - first))
                start += parameter.numel() + gap
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        self.torch_optimizer.load_state_dict(state)


class Bf16(FlatGroups):
    """Stage 1 in bfloat16 with gradients in float32."""

    mark = "fp32_groups_gradients"
    groups_name = "bf16_groups"

    def gradients(self, optimizer: Any = None) -> list[Tensor]:
        return [gradient for group in self.optimizer.fp32_groups_gradients for gradient in group]

    def skip_once(self) -> None:
        optimizer = self.optimizer

        def step(*args: Any, **kwargs: Any) -> None:
            del optimizer.step  # that of the class is restored
            if hasattr(optimizer, "overflow"):  # releases before 0.19.8 would never take it back
                optimizer.overflow = True
            optimizer.clear_hp_grads()
            optimizer.clear_lp_grads()

        optimizer.step = step


class Stages1And2(FlatGroups, Zero):
    mark = "averaged_gradients"
    groups_name = "round_robin_bit16_groups"

    def gradients(self, optimizer: Any = None) -> list[Tensor]:
        """Return the gradients as reduced before a step, else as accumulated so far."""
        # With offload the optimizer looks at them itself before a step, on their way to the host.
        if self.optimizer.cpu_offload:
            return []
        found: list[Tensor | None] = []
        for group in self.optimizer.averaged_gradients.values():
            flat = getattr(group, "flat_partition", None)
            found += group or [] if flat is None else [flat]
        if not found:
            found = [one for kept in self.optimizer.all_grad_tensors.values() for one in kept or []]
            for parameter in (parameter for group in self.optimizer.bit16_groups for parameter in group):
                found += [getattr(parameter, name, None) for name in ("grad", "grad_accum")]
        return [gradient for gradient in found if gradient is not None]

    def known_bad(self) -> bool:
        return bool(getattr(self.optimizer, "local_overflow", False))  # only with offload

    def skip_once(self) -> None:
        looks = self.optimizer.check_grad_overflow
        self.optimizer.check_grad_overflow = True
        _find_overflow_once(self.optimizer, "check_overflow", overflow=True, check_grad_overflow=looks)


class Stage3(Zero):
    """Stage 3: each parameter is divided among the ranks."""

    mark = "grad_partitions_flat_buffer"

    def gradients(self, optimizer: Any = None) -> list[Tensor]:
        return [self.optimizer.grad_partitions_flat_buffer]

    def skip_once(self) -> None:
        _find_overflow_once(self.optimizer, "_overflow_check_and_loss_scale_update", overflow=True)

    def parameter_groups(self) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in self.torch_optimizer.param_groups]
        for number, parameters in enumerate(self.optimizer.fp16_groups):
            found[self.optimizer.sub_group_to_group_id[number]] += parameters
        return found

    def pieces(self, rank: int) -> list[list[Pieces]]:
        optimizer = self.optimizer
        found: list[list[Pieces]] = [[] for _ in self.torch_optimizer.param_groups]
        for number, vector in enumerate(optimizer.fp32_partitioned_groups_flat):
            start, pieces = 0, []
            for parameter in optimizer.fp16_groups[number]:
                length = parameter.ds_tensor.numel()
                pieces.append((parameter, rank * length, start, length))
                start += length
            found[optimizer.sub_group_to_group_id[number]].append((vector, pieces))
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        self.optimizer._set_fp32_optimizer_param_groups()
        try:
            self.torch_optimizer.load_state_dict(state)
        finally:
            self.optimizer._clear_fp32_optimizer_param_groups()


def adapter_of(engine: Any) -> EngineAdapter:
    """Return what an engine is seen through, by what its optimizer has."""
    # `Zero` is for an optimizer of ZeRO that is not known here: its loss scale can be read, its gradients cannot.
    for kind in (Stage3, Stages1And2, Bf16, Whole16, Zero):
        if hasattr(engine.optimizer, kind.mark):
            return kind(engine)
    return (WholeFloat32 if isinstance(engine.optimizer, torch.optim.Optimizer) else EngineAdapter)(engine)


def gradients_of(engine: Any, history: Any = None) -> EngineAdapter:
    """Return what an engine is seen through by OverflowDetector, with the history of its loss scale."""
    adapter = adapter_of(engine)
    adapter.history = history
    if type(adapter) in (EngineAdapter, Zero):
        raise ConfigurationError(
            f"OverflowDetector does not know where {type(engine.optimizer).__name__} of this DeepSpeed keeps gradients."
            " Use DeepSpeed 0.19, another stage of ZeRO, or strategy='lockstep_ddp' to find the overflow."
        )
    return adapter


def _find_overflow_once(owner: Any, *methods: str, **restores: Any) -> None:
    """Let the methods that look for an overflow report one, once; then set these attributes of the owner."""

    def found(*args: Any, **kwargs: Any) -> bool:
        for name in methods:
            delattr(owner, name)  # those of the class are there again
        for name, value in restores.items():
            setattr(owner, name, value)
        return True

    for name in methods:
        setattr(owner, name, found)
