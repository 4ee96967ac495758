"""Which batch a rank gets, what its steps count, and which random numbers they draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_lockstep._lightning import LightningModule, ParallelStrategy
from lightning_lockstep._text import say
from lightning_lockstep._trainer import asks_for_training_loader, weights_only_of_run
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.gather_uneven import giving_nothing
from lightning_lockstep.distributed.plain_data import load_without_objects
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from lightning_lockstep.loaders.counting import Counting, StepCopies
from lightning_lockstep.loaders.global_order import (
    GlobalBatches,
    Share,
    check_the_same,
    divided,
    parts_of,
    seed_of_run,
)
from lightning_lockstep.loaders.streams import shared_stream
from lightning_lockstep.loaders.weights import StepWeights
from lightning_lockstep.numerics.statistics import samples_in
from lightning_lockstep.steps.patching import do_nothing, replaced
from lightning_lockstep.steps.sample_numbers import BatchPlace, SampleNumbers
from lightning_lockstep.strategies.options import LifecycleSettings
from lightning_lockstep.strategies.uneven_inputs import (
    check_has_loss,
    every_rank_contributes,
    has_run_out,
    own_length,
    with_even_batches,
)

_NORMS = torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d
StepPlace = tuple[BatchPlace, int, bool]  # the optimizer step, and whether the batch counts
_NO_BATCH: list[Any] = []  # stands for a training batch that is None; compared by identity


class CountedSteps(ParallelStrategy):
    """What all strategies do about loaders and steps: an optimizer step is a mean over its samples or items."""

    settings: LifecycleSettings
    supervisor: RankSupervisor

    def __init__(self, **options: Any) -> None:
        # The subclass has set ``settings``.
        self.weights = StepWeights()  # of the micro-batches in their optimizer step
        # Samples of all ranks in each micro-batch of an optimizer step, once EffectiveBatchSize has set them.
        self.micro_batches: tuple[int, ...] | None = None
        self.divides_loaders = False  # Trainer(use_distributed_sampler=True); see `begin_counting`
        self.counting: Counting | None = None
        #: Random numbers and batch norm of a fit's training steps, if they are not those of the rank.
        self.sample_numbers: SampleNumbers | None = None
        self._put_back: list[Callable[[], None]] = []
        super().__init__(**options)

    def __repr__(self) -> str:
        settings = self.settings
        fields = [one for one in dataclasses.fields(settings) if getattr(settings, one.name) != one.default]
        given = ", ".join(f"{one.name}={getattr(settings, one.name)!r}" for one in fields)
        return f"{type(self).__name__}({given})"

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def begin_counting(self, trainer: Any) -> None:
        """Take over the loaders of a Trainer and what counts in a call of it."""
        if self.counting is None or self.counting.trainer is not trainer:
            # Lightning would give loaders another sampler, and make batch samplers anew. Here they come as they are.
            connector = trainer._accelerator_connector
            self.divides_loaders, connector.use_distributed_sampler = connector.use_distributed_sampler, False
            self.counting = Counting(trainer, self.settings.duration.total_seconds())
            self.counting.attach()
        self.sample_numbers = None
        by_sample, norm = self.draws_by_sample, self.settings.batch_norm == "of_batch" and self.world_size > 1
        if trainer.state.fn == "fit" and (by_sample or norm):
            self.sample_numbers = SampleNumbers(seed_of_run(), numbers=by_sample, norm=norm)

    def forget_loaders(self) -> None:
        """Forget the weights and the micro-batches of this run."""
        self.weights.clear()
        self.micro_batches = None

    # -- checkpoints: plain data --

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint as plain data unless ``weights_only=False``, without hyperparameters that are objects."""
        return load_without_objects(super().load_checkpoint, checkpoint_path, weights_only_of_run(weights_only))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into a module of the run's precision, so that ``64-true`` does not round them."""
        self.precision_plugin.convert_module(self._module)  # Lightning does so only after it
        super().load_model_state_dict(checkpoint, strict)

    # -- loaders --

    def process_dataloader(self, dataloader: object) -> object:
        """Give this rank its part, and all ranks the same number of training batches. Ranks: all; a gather."""
        if self.lightning_module is None:
            return dataloader
        trainer: Any = self.lightning_module.trainer
        communicator = current_communicator()
        trains, accumulated = asks_for_training_loader(trainer), trainer.accumulate_grad_batches
        rank, ranks = self.global_rank, self.world_size
        part: Any = dataloader
        if self.settings.iterable_datasets == "shard":
            # The weight of a micro-batch depends on the sizes of all micro-batches in its optimizer step.
            ahead = (lambda: trainer.accumulate_grad_batches) if trains else (lambda: 1)
            part = shared_stream(dataloader, rank, ranks, trains=trains, ahead=ahead)
        if part is dataloader and self.divides_loaders:
            sizes, epochs = self.micro_batches if trains else None, trainer.fit_loop.epoch_progress
            done, by_sample = epochs.current.processed, self.draws_by_sample
            part = divided(dataloader, Share(rank, ranks, trains, accumulated, sizes, done, by_sample))
        parts = None if part is dataloader else parts_of(part)
        told = {"kind": "not divided"} if parts is None else parts.compared()
        found = communicator.gather((told, *own_length(part)))
        check_the_same([one[0] for one in found])
        if isinstance(parts, GlobalBatches):
            return part
        is_known = isinstance(dataloader, DataLoader) or not self.divides_loaders or ranks == 1
        if not is_known and communicator.is_main:
            say(
                f"lightning-lockstep: a {type(dataloader).__name__} is no DataLoader of torch and is not divided: each"
                " rank takes all that it gives."
            )
        if not trains:
            return part
        lengths = [one[1:] for one in found]
        return with_even_batches(part, self.settings.uneven_inputs, trainer, communicator, lengths)

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a padding batch, which must contribute nothing."""
        if self.counting is None:
            return False
        if self.counting.is_padding:
            return True
        loop = self.counting.trainer.fit_loop
        joins = self.settings.uneven_inputs == "join" and loop._combined_loader is not None
        return joins and has_run_out(loop._combined_loader, loop.epoch_loop.batch_idx)

    # -- steps --

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss, weighted by its micro-batch's share of the samples in the optimizer step."""
        numbers = nullcontext() if self.sample_numbers is None else self.sample_numbers.backward()
        with numbers, self.weights.weighted(closure_loss) as loss:
            output = super().backward(loss, *args, **kwargs)
        if self._module.automatic_optimization:
            self.put_back()
        return output

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step. Ranks: all, together; an all-reduce for items, and for each loss of LBFGS."""
        module, communicator = self.lightning_module, current_communicator()
        if module is not None and module.automatic_optimization:
            closure = partial(self.weights.correcting, closure, optimizer, communicator)
        if isinstance(optimizer, torch.optim.LBFGS) and communicator.world_size > 1:
            closure = partial(self.weights.mean_loss, closure, communicator)
        with ExitStack() as stack:
            # If no rank contributes, nothing is clipped: without gradients torch's clipping by value raises.
            clips_nothing = partial(replaced, module, configure_gradient_clipping=do_nothing)
            stack.enter_context(replaced(self.weights, left_out=lambda: stack.enter_context(clips_nothing())))
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def put_back(self) -> None:
        """Restore what a padding sample has changed; after the backward, which may need it."""
        while self._put_back:
            self._put_back.pop()()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to this rank's device; ``None`` in training becomes an empty list, which has no step."""
        # Lightning leaves out a batch that is None, and with it the optimizer step that it ends, for which others wait.
        trains = self.lightning_module is not None and self.lightning_module.trainer.training
        if batch is None and trains:
            return _NO_BATCH
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, in which every rank contributes to the reductions."""
        module, communicator = self._module, current_communicator()
        trainer, is_padding = module.trainer, self.is_padding_batch()
        batch, samples = [*args, *kwargs.values()][0], None
        if self._counts_samples(trainer):
            samples = 0 if is_padding or batch is _NO_BATCH else samples_in(batch)
        if not module.automatic_optimization:
            self.weights.of_manual_step(trainer, samples, communicator)
        with ExitStack() as stack:
            if is_padding:
                stack.enter_context(giving_nothing())
                # A rank with padding also has the running statistics of the global batch.
                norms = _NORMS if self.settings.batch_norm == "of_batch" else ()
                self._put_back.append(StepCopies(module, but=norms).restore)
            stack.enter_context(self.drawing_at(self.place_of(batch)))
            if batch is _NO_BATCH:
                stack.enter_context(replaced(module, training_step=do_nothing))
            if module.automatic_optimization and not self.needs_loss and communicator.world_size > 1:
                stack.enter_context(every_rank_contributes(self))
            output = super().training_step(*args, **kwargs)
        if module.automatic_optimization:
            self.weights.of_step(trainer, output, samples, communicator, is_padding=is_padding)
            if self.needs_loss:
                check_has_loss(output, self.needs_loss)
        return output

    def _counts_samples(self, trainer: Any) -> bool:
        """Return whether samples are counted, because no sampler knows the sizes of the batches of all ranks."""
        combined, joins = trainer.fit_loop._combined_loader, self.settings.uneven_inputs == "join"
        loaders = [] if combined is None else combined.flattened
        parts = [one for one in map(parts_of, loaders) if one is not None]
        ends_differ = joins and any(hasattr(loader, "own_batches") for loader in loaders)
        return ends_differ or not all(one.sizes_known for one in parts)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, of shape (ranks, ...), if each has samples. Ranks: all; an all-gather."""
        if self.counting is not None:
            self.counting.check_gather(self.world_size)
        return super().all_gather(tensor, group, sync_grads)

    def _evaluating(self) -> AbstractContextManager[None]:
        """Raise if the run is to stop; return the context of an evaluation's step."""
        self.supervisor.at_step_boundary()
        is_padding = self.counting is not None and self.counting.is_padding
        return giving_nothing() if is_padding else nullcontext()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step, unless the run is to stop."""
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step, unless the run is to stop."""
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's prediction step, unless the run is to stop."""
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over all ranks. Ranks: all, together."""
        # Lightning divides a logged mean by the ranks' mean number of samples, which would be cut to a whole number.
        is_whole = isinstance(tensor, Tensor) and not tensor.dtype.is_floating_point
        if is_whole and reduce_op in ("mean", "avg", None):
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    # -- random numbers and norms, if they are not those of the rank --

    @property
    def draws_by_sample(self) -> bool:
        """Whether each sample has random numbers of its own."""
        return self.settings.random_numbers == "of_sample"

    def on_train_start(self) -> None:
        """Raise, on all ranks, if samples have no positions of their own in the epoch."""
        trainer: Any = self._module.trainer
        loaders = trainer.fit_loop._combined_loader.flattened
        are_divided = [isinstance(parts_of(one), GlobalBatches) for one in loaders]
        if self.draws_by_sample and are_divided != [True]:
            given = f"{len(loaders)} training loaders"
            if not all(are_divided):
                given = "a training loader that is not divided among the ranks"
            raise ConfigurationError(
                f"random_numbers='of_sample' with {given}: expected one DataLoader of a data set with indices, whose"
                " sampler does not divide it, because a sample has its numbers by its position in the epoch."
            )
        super().on_train_start()

    @property
    def needs_loss(self) -> str:
        """Why every rank's step must return a loss; empty if a step without one contributes zero gradients."""
        if self.settings.batch_norm == "of_rank" or self.world_size == 1:
            return ""
        return "the ranks wait for each other in each batch norm with batch_norm='of_batch'"

    def place_of(self, batch: Any) -> StepPlace | None:
        """Return the place by which a step with this batch draws numbers; ``None``: it draws those of this rank."""
        if self.sample_numbers is None or self.lightning_module is None:
            return None
        trainer: Any = self.lightning_module.trainer
        is_padding, combined = self.is_padding_batch(), trainer.fit_loop._combined_loader
        parts = None if combined is None else parts_of(combined.flattened[0])
        if not self.draws_by_sample or not isinstance(parts, GlobalBatches):
            place = BatchPlace(0, 0, 0, 1, samples_in(batch) if self.draws_by_sample else 1)
        else:
            place = parts.place(trainer.fit_loop.epoch_loop.batch_idx)
            if self.weights.is_apart or not parts.sizes_known or (is_padding and parts.kind != "samples"):
                place = place._replace(samples=samples_in(batch))
        return place, trainer.global_step, not is_padding

    def drawing_at(self, place: StepPlace | None) -> AbstractContextManager[None]:
        """Return the context of a step whose random numbers and norms follow this."""
        if place is None or self.sample_numbers is None:
            return nullcontext()
        return self.sample_numbers.step(*place, self.root_device)
