"""DeepSpeed's engine under Lightning's Trainer: how it is made, its precision, and what becomes of its loss scale."""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lockstep._lightning import DeepSpeedPrecision, Precision
from lightning_lockstep._settings import restore_variables
from lightning_lockstep._text import counted, say
from lightning_lockstep.deepspeed.config_parsing import PRECISIONS, for_evaluation, precision_of, section
from lightning_lockstep.deepspeed.engine_adapters import StepOutcome, adapter_of
from lightning_lockstep.distributed import at_shut_down
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced


def adopt_process_group(local_rank: int, timeout: timedelta) -> Callable[[], None]:  # takes the variable back
    """Let DeepSpeed use the process group that exists, whatever its backend; the timeout is of its own sub-groups."""
    # DeepSpeed reads the local rank from the environment. It is removed when the run ends, because the next Trainer
    # would take it for a sign that others have started the ranks. What DeepSpeed keeps of the group goes with it.
    import deepspeed

    if deepspeed.comm.comm.cdb is None:
        at_shut_down(_forget_process_group)
    before = {"LOCAL_RANK": os.environ.get("LOCAL_RANK")}
    os.environ["LOCAL_RANK"] = str(local_rank)
    # Else it compiles an operation for CPUs that only inference uses, half a minute on every rank. The whole table is
    # replaced, because reading it probes every operation, compilers and CUDA included.
    with replaced(deepspeed.ops, __compatible_ops__={"deepspeed_shm_comm": False}):
        deepspeed.init_distributed(auto_mpi_discovery=False, timeout=timeout, verbose=False)
    return partial(restore_variables, before)


def _forget_process_group() -> None:
    """Let DeepSpeed be as it was before it knew of a process group: the next job of a sweep has another."""
    from deepspeed.comm import comm
    from deepspeed.utils import groups

    comm.cdb = None
    groups.mesh_device = None
    for name, kept in vars(groups).items():
        if "_GROUP" in name and isinstance(kept, dict):
            kept.clear()
        elif name.startswith("_") and name.endswith("_GROUP"):
            setattr(groups, name, None)


def evaluation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a complete configuration that an engine needs which does not train."""
    found = for_evaluation(config)
    if config["zero_optimization"]["stage"] != 3:
        del found["zero_optimization"]
    return {"train_micro_batch_size_per_gpu": 1, **found}


def divided_as_made(config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Divide parameters among the ranks as the body, on all ranks together, makes them; in stage 3."""
    if config["zero_optimization"]["stage"] != 3:
        return nullcontext()
    import deepspeed

    made: AbstractContextManager[None] = deepspeed.zero.Init(config_dict_or_path=evaluation_config(config))
    return made


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
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints how much memory is in use, past its own logger
        engine, engine_optimizer, _, _ = deepspeed.initialize(
            # Read for the index of the device, a CPU's too.
            args=argparse.Namespace(device_rank=device_index),
            config=dict(config),
            model=module,
            model_parameters=trained,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
    return engine, engine_optimizer


# -- Precision and loss scale: what the Trainer and the configuration ask for together --

# A dynamic loss scale of 2^16 that comes down to 2^6 skips ten steps in a row.
_IN_A_ROW = 10


class LossScaleHistory:
    """Counts skipped optimizer steps, and says when they are more than a loss scale that adapts itself explains."""

    def __init__(self) -> None:
        self.skips = self.skips_in_a_row = 0
        self.told = False  # whether a verdict was printed
        # The next step is skipped on request, which says nothing about the loss scale.
        self.expects_skip = False
        self._last: StepOutcome | None = None

    def record(self, outcome: StepOutcome) -> None:
        expected, self.expects_skip = self.expects_skip, False
        last, self._last = self._last, outcome
        skipped = outcome.skipped
        if skipped is None:
            skipped = last is not None and outcome.scale < last.scale  # type: ignore[operator] # neither is None
        if not skipped or expected:
            self.skips_in_a_row = 0
            return
        self.skips += 1
        self.skips_in_a_row += 1

    def verdict(self) -> str | None:
        """Return why the last skips are too many; ``None`` if they are not."""
        if self._last is None or not self.skips_in_a_row:
            return None
        scale, floor = self._last.scale, self._last.floor
        if scale is not None and floor is not None and scale <= floor:
            return (
                f"The loss scale has reached its floor, min_loss_scale={floor:g}, and steps are still skipped: the"
                " model is diverging or producing nan. Lower the learning rate, clip gradients, or train in bf16."
            )
        if scale is None or self.skips_in_a_row >= _IN_A_ROW:
            of_loss = "the loss is not scaled" if scale is None else f"the loss scale is {scale:g}"
            return (
                f"DeepSpeed has just skipped {counted(self.skips_in_a_row, 'optimizer step')}, and {of_loss}: the"
                " loss or a gradient is nan or infinite. Look for the batch or the layer that causes it."
            )
        return None


class EnginePrecision(DeepSpeedPrecision):
    """Lightning's precision plugin of DeepSpeed, whose engine steps and divides as Lightning's loop does."""

    # Lightning counts accumulated batches from the start of each epoch and DeepSpeed goes on counting over the epochs,
    # so the engine is told after which batches it steps. It does not divide the loss by their number: Lightning does.

    def __init__(self, precision: Any) -> None:
        super().__init__(precision)
        self.history = LossScaleHistory()
        self.has_accumulated = False  # gradients of batches after which no step was made yet
        self._steps = False  # whether a backward is that of a batch after which the optimizer steps

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        self.has_accumulated = False
        return super().connect(model, optimizers, lr_schedulers)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("scale_wrt_gas", not model.automatic_optimization)
        if self._steps or not model.automatic_optimization:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        engine = model.trainer.model
        _tell_boundary(engine, False)
        super().backward(tensor, model, optimizer, *args, **kwargs)
        engine.step()  # counts the batch
        self.has_accumulated = True

    def optimizer_step(  # type: ignore[override] # as Lightning's own plugin of DeepSpeed
        self, optimizer: Any, model: Any, closure: Any, **kwargs: Any
    ) -> Any:
        """Run the closure and the engine's step, which is skipped if gradients are not finite."""
        adapter = adapter_of(model.trainer.model)
        before = adapter.engine.global_steps
        # Otherwise nobody knows before a backward whether a step will follow.
        if model.automatic_optimization:
            _tell_boundary(adapter.engine, True)
        with replaced(self, _steps=True):
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self.has_accumulated = False
        outcome = adapter.outcome() if adapter.engine.global_steps != before else None
        if outcome is not None:
            self.history.record(outcome)
            if not self.history.told and (verdict := self.history.verdict()):
                self.history.told = True
                if model.trainer.is_global_zero:
                    say(f"lightning-lockstep: {verdict}")
        return result


def _tell_boundary(engine: Any, steps: bool) -> None:
    if not getattr(engine, "zenflow", False):  # it decides itself after which batches it steps
        engine.set_gradient_accumulation_boundary(steps)


def resolve_deepspeed_precision(
    config: Mapping[str, Any],
    plugin: Precision,
    requested: str | None,  # None: a plugin or nothing was given
    device_type: str,
) -> Precision:
    """Return the plugin for what the Trainer or, if that says nothing, the configuration asks for."""
    from deepspeed.accelerator import get_accelerator

    name = requested or precision_of(config) or str(plugin.precision)
    if PRECISIONS.get(name) == "fp16":
        if device_type == "cpu" and not get_accelerator().is_fp16_supported():
            raise ConfigurationError(
                f"precision={name!r}: expected '32-true', 'bf16-mixed' or 'bf16-true', because this CPU does not"
                " compute in float16."
            )
        unscaled = section(config, "fp16").get("loss_scale") == 1
        if config["zero_optimization"]["stage"] == 0 and not unscaled:
            raise ConfigurationError(
                f"stage=0 with precision={name!r}: expected stage 1, 2 or 3, because without ZeRO DeepSpeed divides the"
                " gradients by a loss scale that it has not multiplied the loss with. Or write fp16.loss_scale: 1."
            )
    return EnginePrecision(name)  # Lightning's own plugin says which names there are
