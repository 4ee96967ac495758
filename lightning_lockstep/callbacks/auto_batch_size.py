"""AutoBatchSize: the largest batch that fits, on any number of ranks, and a run that survives a larger one."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from lightning_lockstep._lightning import BatchSizeFinder, LightningModule, Trainer, rank_zero_only
from lightning_lockstep._settings import settings_of
from lightning_lockstep._text import counted, say
from lightning_lockstep._trainer import faults_as_lightnings
from lightning_lockstep.batch_size.loaders import BatchLoaders, SearchRefusedError, in_fit
from lightning_lockstep.batch_size.memory import return_freed_memory
from lightning_lockstep.batch_size.recovery import Recovery
from lightning_lockstep.batch_size.search_run import (
    AutoBatchSizeSettings,
    SearchResult,
    fingerprint_of,
    keep_result,
    known_size,
    refuse_engine,
    refuse_fixed_sizes,
    refuse_strategy,
    run_search,
    say_once,
)
from lightning_lockstep.batch_size.trial import largest_to_try, steps_per_epoch
from lightning_lockstep.callbacks.effective_batch_size import (
    EffectiveBatchSize,
    keeper_of_global_batch,
    unaccumulated,
)
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.rank_supervisor import current_job
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.snapshot import RandomState, Snapshot


class AutoBatchSize(BatchSizeFinder):
    """Finds the largest batch size that fits on every rank, before a fit, validate, test or predict.

    A fit keeps its global batch (the loader's batch size x ``accumulate_grad_batches`` x ranks), and with it its
    optimizer steps: what fits decides how it is divided into micro-batches. Evaluations take the largest that fits.

    All ranks try the same size at the same time, each by itself; a size fits when it fits on all of them. The
    search then restores the state of the run exactly. During a trial every attribute named ``batch_arg_name``
    holds the size that is tried; afterwards it holds the size found, or its old value if the search raises. Without
    ``global_batch_size`` it and ``accumulate_grad_batches`` have their old values again when the run has ended.

    It replaces Lightning's ``BatchSizeFinder`` and has the same arguments (up to ``max_val``), hooks,
    ``scale_batch_size`` and ``optimal_batch_size``.

    Args:
        mode: ``model`` fits memory = a + b x size to small trials, predicts the largest size and confirms it
            (where memory cannot be read it works as ``binsearch``); ``binsearch`` grows until a size does not
            fit and narrows down; ``power`` doubles until one does not fit; ``off`` does not search.
        steps_per_trial: Optimizer steps of a trial; at least 2 to see the optimizer's state in place.
        init_val: First size to try.
        max_trials: Maximum number of sizes to try.
        batch_arg_name: Attribute of the module, its hparams, the data module or its hparams that the loader
            is made with. Not used when a DataLoader is passed to ``fit()``.
        margin: Fraction by which the result stays below the largest size that fitted (0 to 1); not applied in
            mode ``power``, nor where the data or ``max_val`` were the limit.
        max_val: Largest size to try. Sizes with which the run could not begin are never tried: the loader cannot
            be made, an epoch has no full batch (``drop_last``), or less than one under ``limit_train_batches``.
        memory_limit: Maximum memory of a rank, in bytes or as ``"4GiB"``. By default what the device has free;
            on CPU ``RLIMIT_AS``, the control group's limit or the host's memory, divided by the ranks of the
            host.
        limit: ``shard``: never larger than the data one rank gets. ``None`` tries larger ones too, with
            samples repeated.
        global_batch_size: Samples of all ranks in one optimizer step of a fit, by gradient accumulation (see
            :class:`EffectiveBatchSize`). ``None`` keeps what is configured; ``"largest"`` takes all that fits, as
            Lightning's does, with a warning if an epoch then has fewer optimizer steps.
        on_oom: When memory runs out in a training step later: ``raise``; ``split`` runs that batch again in
            micro-batches under the same optimizer step; ``skip`` leaves that optimizer step out on all ranks.
        loss_reduction: How the training step's loss adds up over samples, for ``split``.
        reuse: When a run is resumed, take the size that it found before.
        plot: Also draw memory over batch size to ``batch_size.png``.
        effective_batch_size: Old name of ``global_batch_size``; accepted until the next release.

    Attributes:
        result: What the last search found, or ``None``.
        optimal_batch_size: Samples per rank that the last search found; before it ``init_val``, and ``None`` under
            ``fast_dev_run``.
        batches_split: Batches split or skipped during training on any rank; known on rank 0, and on all ranks
            after every epoch.

    Raises:
        ConfigurationError: An argument cannot be used; the message lists every error. It is a
            ``MisconfigurationException`` too.
        BatchSizeError: No size fits, or a search is not possible here, which is a ``MisconfigurationException`` too.
            (On every rank, at the start.)

    Source: https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.BatchSizeFinder.html

    Ranks: add it on every rank. Before the first trial the ranks agree on the largest size that all can run; a
        trial costs one all-reduce of 24 bytes on the CPU. During training nothing is sent unless memory runs
        out; the cost per step is one ``try`` and one look at the gradients.
    """

    SUPPORTED_MODES: tuple[str, ...] = ("model", "binsearch", "power", "off")  # type: ignore[assignment]

    def __init__(
        self,
        mode: Literal["model", "binsearch", "power", "off"] = "model",
        steps_per_trial: int = 2,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        memory_limit: str | int | float | None = None,
        limit: Literal["shard"] | None = "shard",
        global_batch_size: int | Literal["largest"] | None = None,
        on_oom: Literal["raise", "split", "skip"] = "raise",
        loss_reduction: Literal["mean", "sum"] = "mean",
        reuse: bool = True,
        plot: bool = False,
        effective_batch_size: int | None = None,
    ) -> None:
        with faults_as_lightnings():
            if effective_batch_size is not None:
                note = "AutoBatchSize(effective_batch_size=...) is called global_batch_size, the one name from now on."
                rank_zero_only(warnings.warn)(note, FutureWarning, stacklevel=3)
                if global_batch_size is not None:
                    raise ConfigurationError(
                        f"effective_batch_size={effective_batch_size!r}: expected None together with global_batch_size."
                    )
                global_batch_size = effective_batch_size
            mode = cast(Any, str(mode).lower())  # as Lightning does
            self.settings = settings_of(AutoBatchSizeSettings, locals())
        super().__init__(mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        self.result: SearchResult | None = None
        self.batches_split = 0
        size = self.settings.global_batch_size
        self._keeper: EffectiveBatchSize | None = None
        if isinstance(size, int):
            self._keeper = EffectiveBatchSize(size, batch_arg_name=batch_arg_name)
        # Puts back, when a run ends, what nobody asked to change.
        self._as_configured: ExitStack | None = None
        self._found: dict[str, Any] = {}
        self._recovery: Recovery | None = None
        self._unlogged = False

    # -- when ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str | None = None) -> None:
        """Refuse a strategy under which no size can be tried. Ranks: all ranks; nothing is sent."""
        settings = self.settings
        if settings.on_oom != "raise":
            refuse_engine(trainer, settings.on_oom)
        searches = settings.mode != "off" and not getattr(trainer, "fast_dev_run", False)
        if searches:
            refuse_strategy(trainer)
        if stage == "fit" and (self._keeper is not None or (searches and not self._takes_largest)):
            what = f"AutoBatchSize(global_batch_size={settings.global_batch_size}) sets the accumulation"
            refuse_fixed_sizes(trainer, what, accumulates=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, and guard the steps to come. Ranks: all, together."""
        super().on_fit_start(trainer, pl_module)
        if self.settings.mode == "off" and self._keeper is not None:
            keeper = keeper_of_global_batch(trainer, self._keeper, self.settings.global_batch_size)
            assert keeper is not None
            place = unaccumulated(trainer, pl_module, self.settings.batch_arg_name)
            keeper.divide(trainer, place, largest=place.size)
        if self.settings.on_oom != "raise":
            refuse_strategy(trainer)
            self._recovery = Recovery(
                trainer,
                pl_module,
                mode=self.settings.on_oom,
                loss_reduction=self.settings.loss_reduction,
                on_count=self._counted,
            )

    def scale_batch_size(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Search, unless ``mode`` is ``off``; the hooks that come before a loop call this.

        A subclass may call it elsewhere, in ``on_train_epoch_start`` for example.

        Raises:
            BatchSizeError: As :meth:`find`.

        Ranks: all, together.
        """
        if self.settings.mode == "off":
            return
        self.find(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the number of batches split, when it has changed. Ranks: rank 0 writes; nothing is sent."""
        if self._unlogged:
            self._unlogged = False
            for logger in trainer.loggers:
                logger.log_metrics({"batches_split": float(self.batches_split)}, step=trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count over all ranks. Ranks: all, together; one gather an epoch."""
        if self._recovery is not None:
            self.batches_split = sum(current_communicator().gather(self._recovery.recovered))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go of the loop, and put back the size that was configured. Ranks: any, alone."""
        if self._as_configured is not None:
            self._as_configured.close()
            self._as_configured = None
            self._keeper = None
        if self._recovery is not None:
            self._recovery.close()
            self._recovery = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of the loop and the module, which have no teardown then. Ranks: any, alone."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> dict[str, Any]:
        """Return the size found, for a resumed run."""
        return dict(self._found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the size that the resumed run found."""
        self._found = dict(state_dict)

    # -- what ---------------------------------------------------------------------------------------------

    def find(self, trainer: Trainer, pl_module: LightningModule) -> int | None:
        """Search now, and let the run go on with what is found.

        Returns:
            The batch size per rank, or ``None`` under ``fast_dev_run``.

        Raises:
            BatchSizeError: No size fits, or a search is not possible here.

        Ranks: all, together.
        """
        self.optimal_batch_size = self.result = None
        if getattr(trainer, "fast_dev_run", False):
            say_once("AutoBatchSize: no search under fast_dev_run")
            return None
        refuse_strategy(trainer)
        settings = self.settings
        place, keeper = self._place_and_keeper(trainer, pl_module)
        most, why_none_above = self._largest_to_try(trainer, place, keeper)
        fingerprint, known = fingerprint_of(trainer, pl_module, settings, most), None
        folder = _result_folder(trainer)
        # Who searches in mid-fit does so since something has changed.
        in_mid_fit = in_fit(trainer) and trainer.train_dataloader is not None
        if settings.reuse and trainer.ckpt_path is not None and not in_mid_fit:
            known = known_size(trainer, self._found, folder, fingerprint)
        with place.former_size(on_error_only=True):
            if known is not None:
                size, tight = known
                say_once(
                    f"AutoBatchSize: batch size {size} per rank, as found earlier under the same conditions"
                )
                if tight:
                    return_freed_memory()
            else:
                found = run_search(
                    trainer,
                    pl_module,
                    place,
                    settings,
                    most=most,
                    why_none_above=why_none_above,
                    accumulates=keeper is not None,
                )
                size, self.result = found.size, found
                self._found = {"size": size, "tight": found.tight, "fingerprint": fingerprint}
            if keeper is not None:
                keeper.divide(trainer, place, largest=size)
            else:
                self._warn_of_fewer_steps(trainer, place, size)
                place.apply(size)
        if self.result is not None:
            self.result = replace(
                self.result,
                size=place.size,
                accumulate=trainer.accumulate_grad_batches,
                fingerprint=fingerprint,
            )
            keep_result(trainer, folder, self.result, plot=settings.plot)
        self.optimal_batch_size = place.size
        return place.size

    def _place_and_keeper(
        self, trainer: Trainer, module: LightningModule
    ) -> tuple[BatchLoaders, EffectiveBatchSize | None]:
        """Return where the batch size lives, and what divides the global batch of a fit, if anything does."""
        settings = self.settings
        keeper = keeper_of_global_batch(trainer, self._keeper, settings.global_batch_size)
        # A loader's hook may look at it. What a keeper accumulates is decided afterwards, by the size found.
        accumulate = trainer.accumulate_grad_batches if keeper is None else 1
        with Snapshot(RandomState.capture()), replaced(trainer, accumulate_grad_batches=accumulate):
            place = BatchLoaders(trainer, module, settings.batch_arg_name)
        if len(place.loaders) > 1 and not in_fit(trainer):
            raise SearchRefusedError(
                f"there are {len(place.loaders)} loaders; one size for all of them would fit the largest batch"
                " only. Pass one loader at a time."
            )
        if keeper is not None or settings.global_batch_size is not None:
            return place, keeper
        # Nobody has asked for another size: what an evaluation takes is not for the fit that follows, nor what this fit
        # takes for the next one.
        self._as_configured = ExitStack()
        self._as_configured.enter_context(place.former_size())
        if in_fit(trainer):
            per_rank = torch.tensor(min(place.size, place.samples))
            total = int(current_communicator().all_reduce(per_rank)) * accumulate
            keeper = self._keeper = EffectiveBatchSize(total, batch_arg_name=settings.batch_arg_name)
            self._as_configured.enter_context(replaced(trainer, accumulate_grad_batches=accumulate))
        return place, keeper

    def _largest_to_try(
        self, trainer: Trainer, place: BatchLoaders, keeper: EffectiveBatchSize | None
    ) -> tuple[int, str]:
        """Return the largest size with which the run can go on, and why it is."""
        accumulate = trainer.accumulate_grad_batches if keeper is None else 1
        with Snapshot(RandomState.capture()), replaced(trainer, accumulate_grad_batches=accumulate):
            return largest_to_try(
                trainer,
                place,
                max_val=self.settings.max_val,
                within_shard=self.settings.limit == "shard",
                global_batch=None if keeper is None else keeper.global_batch_size,
                as_configured=self._as_configured is not None,
            )

    @property
    def _takes_largest(self) -> bool:
        """Whether the size that fits is the one to train with."""
        return self.settings.global_batch_size == "largest"

    def _warn_of_fewer_steps(self, trainer: Trainer, place: BatchLoaders, size: int) -> None:
        if not in_fit(trainer) or not current_communicator().is_main:
            return
        steps, before = (steps_per_epoch(trainer, place, each) for each in (size, place.size))
        if steps < before:
            samples = trainer.accumulate_grad_batches * trainer.world_size
            warnings.warn(
                f"batch size {size} per rank instead of {place.size}: an epoch has"
                f" {counted(steps, 'optimizer step')} instead of {before}, and the learning rate stays as it is."
                f" The size that fits need not be one that trains well. AutoBatchSize(global_batch_size="
                f"{place.size * samples}) keeps the steps; EffectiveBatchSize({size * samples}, lr_scaling='linear',"
                f" reference_batch_size={place.size * samples}) scales the learning rate.",
                stacklevel=2,
            )

    def _counted(self, rank: int, text: str) -> None:
        self.batches_split += 1
        self._unlogged = True
        # Every batch of a run may be split from some point on; the number is logged, a few lines are enough.
        if self.batches_split <= 3 or str(self.batches_split).strip("0") in ("1", "3"):
            say(f"AutoBatchSize: rank {rank} {text} ({self.batches_split} so far)")


def _result_folder(trainer: Trainer) -> Path | None:
    """Return where the result of a search is kept, also for a resumed run; ``None`` if there is no such folder."""
    folder, job = Path(trainer.default_root_dir), current_job()
    if folder != Path.cwd() or (job is not None and Path(job[0]).resolve() == folder):
        return folder
    # Nothing is left in a current folder that is no run folder: Lightning does not say who has named it.
    of_logger = getattr(trainer.logger, "log_dir", None)
    return Path(of_logger) if of_logger else None
