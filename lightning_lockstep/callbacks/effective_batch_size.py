"""EffectiveBatchSize: the same global batch on any number of ranks."""

from __future__ import annotations

import math
import warnings
from typing import Any, Literal

from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep._trainer import ranks_at_start
from lightning_lockstep.batch_size.loaders import BatchLoaders
from lightning_lockstep.batch_size.search import EffectiveBatch, plan_effective_batch
from lightning_lockstep.batch_size.search_run import refuse_fixed_sizes, say_on_main
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import BatchSizeError
from lightning_lockstep.steps.patching import put_in_place, replaced

LearningRateScaling = Literal["linear", "sqrt"]


class EffectiveBatchSize(Callback):
    """Keeps the global batch (micro-batch x accumulation x ranks) the same on any number of ranks.

    The configured batch size is the largest micro-batch; it is kept or made smaller, and
    ``accumulate_grad_batches`` is set, so that each optimizer step has exactly that many samples on any number of
    ranks. With a sampler of your own, or under Lightning's strategies, the nearest global batch is taken if no product
    gives it, with a warning.

    Args:
        global_batch_size: Samples of all ranks in one optimizer step.
        batch_arg_name: Attribute that holds the batch size, if no DataLoader is passed to ``fit()``.
        lr_scaling: ``linear`` or ``sqrt``: scale every learning rate when the global batch differs from
            ``reference_batch_size``. ``None`` leaves them unchanged.
        reference_batch_size: Global batch that the learning rate was chosen for; by default
            ``global_batch_size``, so that learning rates change only if the global batch cannot be exact.

    Attributes:
        plan: How the batch is divided, once the fit has begun.

    Raises:
        ConfigurationError: An argument cannot be used; the message lists every error.
        BatchSizeError: The batch size cannot be changed here. (On every rank, when the fit begins.)

    Ranks: add it on every rank; nothing is sent. No cost per step.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        batch_arg_name: str = "batch_size",
        lr_scaling: LearningRateScaling | None = None,
        reference_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        faults = Faults()
        what = "a whole number of samples in one optimizer step"
        faults.whole("global_batch_size", global_batch_size, what=what)
        faults.whole("reference_batch_size", reference_batch_size, what=what, optional=True)
        faults.choice("lr_scaling", lr_scaling, ("linear", "sqrt", None))
        faults.raise_all()
        self.global_batch_size = global_batch_size
        self.batch_arg_name = batch_arg_name
        self.lr_scaling = lr_scaling
        self.reference_batch_size = reference_batch_size or global_batch_size
        self.plan: EffectiveBatch | None = None
        self._scaled = False  # whether the learning rates are those of the plan

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier fit's plan, and divide before the optimizers are made. Ranks: all; nothing is sent."""
        if stage != "fit":
            return
        self.plan = None
        beside = [one for one in getattr(trainer, "callbacks", ()) if isinstance(one, EffectiveBatchSize)]
        sizes = {str(one.global_batch_size) for one in beside}
        if len(sizes) > 1:
            text = f"{len(beside)} EffectiveBatchSize ask for global batches of {' and '.join(sorted(sizes))}"
            raise BatchSizeError(f"{text}: expected one size. Leave out all but one.")
        refuse_fixed_sizes(trainer, f"EffectiveBatchSize({self.global_batch_size})", accumulates=True)
        set_up = trainer.strategy.setup

        # Not now: the module's setup hook may still make what its loaders read. Not later: schedules count steps.
        def setup(trainer: Trainer) -> None:
            put_back()
            with replaced(trainer, accumulate_grad_batches=1):  # a hook that makes a loader may read it
                place = BatchLoaders(trainer, pl_module, self.batch_arg_name)
            self.divide(trainer, place, largest=place.size)
            set_up(trainer)

        put_back = put_in_place(trainer.strategy, "setup", setup)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Scale the learning rates, unless a search has just done that. Ranks: all ranks; nothing is sent."""
        if self.plan is not None and not self._scaled:
            self._scale_learning_rates(trainer, self.plan.total, self.reference_batch_size)

    def divide(self, trainer: Trainer, place: BatchLoaders, *, largest: int) -> None:
        """Divide the global batch, or divide it again after a search for the largest micro-batch. Ranks: all ranks."""
        # In a fit, before its first batch and before a checkpoint's optimizer state is loaded.
        requested = self.global_batch_size
        if requested < trainer.world_size:
            raise BatchSizeError(
                f"a global batch of {requested} cannot be divided among {trainer.world_size} ranks: expected at least"
                " one sample for each"
            )
        reference = self.plan.total if self.plan is not None and self._scaled else self.reference_batch_size
        sizes = [str(loader.batch_size) for loader in place.loaders]
        if len(set(sizes)) > 1:
            raise BatchSizeError(
                f"a global batch of {requested} cannot be divided among training loaders with batch sizes of"
                f" {' and '.join(sizes)}: expected one size. Set the sizes yourself, without this callback"
            )
        largest = min(largest, place.samples)
        any_size = place.can_differ and trainer.lightning_module.automatic_optimization
        ranks = ranks_at_start(trainer)  # if some are lost, the strategy divides the batch among the others
        plan = plan_effective_batch(requested, ranks=ranks, largest=largest, any_size=any_size)
        changes = (plan.micro_batch, plan.accumulate) != (place.size, trainer.accumulate_grad_batches)
        if changes and not trainer.lightning_module.automatic_optimization:
            raise BatchSizeError(
                f"a global batch of {requested} needs {plan}, but {place.size} per rank are configured, and with"
                " manual optimization the module decides how many micro-batches make an optimizer step. Set the batch"
                " size yourself, or write AutoBatchSize(global_batch_size='largest')"
            )
        self.plan = plan
        if not self.plan.exact and current_communicator().is_main:
            warnings.warn(
                f"a global batch of {requested} is not possible here; the nearest is used: {self.plan}.",
                stacklevel=2,
            )
        if any_size:
            trainer.strategy.micro_batches = self.plan.sizes  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = self.plan.accumulate
        place.apply(self.plan.micro_batch)
        self._scale_learning_rates(trainer, self.plan.total, reference)

    def _scale_learning_rates(self, trainer: Trainer, total: int, reference: int) -> None:
        """Scale the learning rate of every parameter group, and what its schedulers start from."""
        self._scaled = bool(trainer.strategy.optimizers)
        if self.lr_scaling is None or total == reference:
            return
        # ``linear`` follows Goyal et al. 2017 (SGD, https://arxiv.org/abs/1706.02677), ``sqrt`` is the rule for
        # adaptive optimizers (Malladi et al. 2022, https://arxiv.org/abs/2205.10287).
        ratio = total / reference
        factor = ratio if self.lr_scaling == "linear" else math.sqrt(ratio)
        for optimizer in trainer.strategy.optimizers:
            for group in optimizer.param_groups:
                before = float(group["lr"])
                for key in group.keys() & {"lr", "initial_lr"}:
                    group[key] = float(group[key]) * factor
                why = f"{self.lr_scaling} scaling: global batch {reference} -> {total}"
                say_on_main(f"learning rate {before:g} -> {group['lr']:g} ({why})")
        for config in trainer.lr_scheduler_configs:
            scheduler: Any = config.scheduler
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [float(rate) * factor for rate in scheduler.base_lrs]
