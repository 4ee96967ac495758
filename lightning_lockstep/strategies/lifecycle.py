"""The life of the ranks of a strategy: launch, rendezvous, placement, loaders, steps, failures and the end.

A strategy inherits from :class:`RankLifecycle` first and from one of Lightning's strategies second, so that the methods
here run around Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningModule,
    ParallelStrategy,
    Precision,
    Strategy,
    rank_zero_only,
    reset_seed,
)
from lightning_lockstep._registry import public, strategy_repr
from lightning_lockstep._settings import launcher_pid
from lightning_lockstep._text import say
from lightning_lockstep._trainer import asks_for_training_loader, given_to_trainer, weights_only_of_run
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.distributed.checkpoint_folder import whole_folder
from lightning_lockstep.distributed.coordination.gather_uneven import giving_nothing
from lightning_lockstep.distributed.failure.members import current_membership
from lightning_lockstep.distributed.failure.process_exit import outcome
from lightning_lockstep.distributed.guard.rank_state import size_flight_recorder
from lightning_lockstep.distributed.plain_data import load_without_objects
from lightning_lockstep.distributed.side_channel.zeromq import need_descriptors
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    belongs_to_slurm,
)
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from lightning_lockstep.launchers.subprocess_script import check_ranks, have_met
from lightning_lockstep.loaders.counting import Counting, StepCopies
from lightning_lockstep.loaders.global_order import GlobalBatches, Share, check_the_same, divided, parts_of
from lightning_lockstep.loaders.streams import shared_stream
from lightning_lockstep.loaders.weights import StepWeights, samples_in
from lightning_lockstep.numerics.precision import requested_precision, resolve_precision
from lightning_lockstep.steps.generators import seed_generators
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.steps.sample_numbers import SampleNumbers
from lightning_lockstep.stopping.loader_position import LoaderPosition
from lightning_lockstep.strategies.by_sample import BySample
from lightning_lockstep.strategies.options import LifecycleSettings, show_placement
from lightning_lockstep.strategies.startup import RankStartup
from lightning_lockstep.strategies.uneven_inputs import (
    UnevenInputs,
    check_has_loss,
    every_rank_contributes,
    own_length,
)


class _NoBatch(tuple[Any, ...]):
    """Stands for a training batch that is ``None``."""


_NO_BATCH = _NoBatch()


class LockstepStrategy(Strategy):
    """Base of all strategies: an optimizer step is a mean over its samples or items, checkpoints are plain data."""

    #: Weights of the micro-batches in their optimizer step; a subclass sets it before it calls Lightning's constructor.
    weights: StepWeights
    #: Random numbers and batch norm of a fit's training steps, if they are not those of the rank.
    sample_numbers: SampleNumbers | None = None
    __repr__ = strategy_repr

    def __init__(self, **options: Any) -> None:
        self._put_back: list[Callable[[], None]] = []
        super().__init__(**options)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss, weighted by its micro-batch's share of the samples in the optimizer step."""
        numbers = nullcontext() if self.sample_numbers is None else self.sample_numbers.backward()
        with self.weights.weighted(closure_loss) as loss, numbers:
            output = super().backward(loss, *args, **kwargs)
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            self.put_back()
        return output

    def put_back(self) -> None:
        """Restore what a padding sample has changed; after the backward, which may need it."""
        while self._put_back:
            self._put_back.pop()()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step. Ranks: all, together; an all-reduce for items, and for each loss of LBFGS."""
        module, communicator = self.lightning_module, current_communicator()
        if module is not None and module.automatic_optimization:
            closure = partial(self.weights.correcting, closure, optimizer, communicator)
        if isinstance(optimizer, torch.optim.LBFGS) and communicator.world_size > 1:
            closure = partial(_mean_loss, closure, self.weights, communicator)
        with ExitStack() as stack:
            # Without gradients torch's clipping by value raises.
            clips_nothing = partial(replaced, module, configure_gradient_clipping=_no_step)
            stack.enter_context(replaced(self.weights, left_out=lambda: stack.enter_context(clips_nothing())))
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint as plain data unless ``weights_only=False``, without hyperparameters that are objects."""
        return load_without_objects(
            super().load_checkpoint, checkpoint_path, weights_only_of_run(weights_only)
        )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into a module of the run's precision, so that ``64-true`` does not round them."""
        assert self.lightning_module is not None
        self.precision_plugin.convert_module(self.lightning_module)  # Lightning does so only after it
        super().load_model_state_dict(checkpoint, strict)


class RankLifecycle(BySample, LockstepStrategy, ParallelStrategy):
    """Base of strategies with one process per device."""

    settings: LifecycleSettings
    trains_over_mpi = False  # whether ranks of ``srun --mpi=...`` are ranks of an MPI job
    cluster_environment: Any
    num_nodes: int

    def __init__(
        self, startup: RankStartup, *, cluster_environment: ClusterEnvironment | None = None, **options: Any
    ) -> None:
        # The subclass has set ``settings``.
        self.startup, self.supervisor = startup, RankSupervisor(self.settings.supervisor)
        self.weights = StepWeights()
        self._uneven_inputs = UnevenInputs(self.settings.uneven_inputs)
        # Samples of all ranks in each micro-batch of an optimizer step, once EffectiveBatchSize has set them.
        self.micro_batches: tuple[int, ...] | None = None
        self.divides_loaders = False  # Trainer(use_distributed_sampler=True); see `_take_over_loaders`
        self.counting: Counting | None = None
        super().__init__(cluster_environment=cluster_environment, **options)
        if cluster_environment is None:
            # Lightning uses an environment among the plugins only if the strategy has none, and without a plugin it
            # searches for one itself, which starts MPI. It raises if a strategy made before the Trainer has one too.
            plugins = given_to_trainer("plugins")
            several = plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
            given = (one for one in several if isinstance(one, ClusterEnvironment))
            self.cluster_environment = next(given, None) or startup.environment(mpi=self.trains_over_mpi)

    # -- which ranks there are, and whether one has failed ---------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of ranks per node."""
        return len(self.parallel_devices or ())

    @property
    def process_group_backend(self) -> str | None:
        """Name of the backend of the process group; ``None`` until the ranks are connected, if none was given."""
        return self.startup.backend

    @property
    def device_type(self) -> str:
        """Type of this rank's device; ``cpu`` until the Trainer has given the strategy its devices."""
        return (self.parallel_devices or [torch.device("cpu")])[0].type

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, after which no rank may wait for another."""
        return self.supervisor.propagation is not None and self.supervisor.propagation.failed

    def check_failure(self) -> None:
        """Raise if another rank has failed, or if all ranks are to raise an error of the guard."""
        if self.supervisor.propagation is not None:
            self.supervisor.propagation.check()

    # -- while the Trainer is under construction: an error here ends the program before any rank starts --------

    def resolve_precision(self, plugin: Precision, requested: str | None, device_type: str) -> Precision:
        """Return the precision plugin to use, by Lightning's and the name that the user gave, or raise."""
        return resolve_precision(plugin, requested, device_type)

    def _configure_launcher(self) -> None:
        outcome.install_excepthook()
        self.startup.adopt_ranks(self)
        membership = current_membership()
        if membership is None or self.num_processes * self.num_nodes == 1:
            check_ranks(self.supervisor, self)
        elif not self.startup.outlives:
            raise ConfigurationError(
                "on_lost_rank='end' after a Trainer with on_lost_rank='continue': expected 'continue' in each Trainer"
                " of several ranks of a script, because all use the same ranks."
            )
        if self.num_nodes == 1:
            need_descriptors(self.num_processes)  # only rank 0 needs them; with several nodes it checks later
        self.precision_plugin = self.resolve_precision(
            self.precision_plugin, requested_precision(), self.root_device.type
        )
        of_rank = self.settings.batch_norm == "of_rank"
        if given_to_trainer("sync_batchnorm") and (self.device_type == "cpu" or not of_rank):
            why = "torch's layer refuses CPUs" if of_rank else "batch_norm='of_batch' does the same"
            raise ConfigurationError(
                f"sync_batchnorm=True: expected False, because {why}. batch_norm='of_batch' of the strategy works on"
                " any device, and replaces no layer."
            )
        self._launcher = self.startup.launcher(self)

    def setup(self, trainer: Any) -> None:
        """Set the run up; in a fit, random numbers follow seed and rank from here on. Ranks: all, together."""
        super().setup(trainer)
        if trainer.state.fn == "fit" and self.global_rank:
            # All ranks have drawn alike so far; rank 0 goes on as one process does.
            seed_generators(int(torch.randint(2**31, ())) + self.global_rank)

    # -- the start, and the end ------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Give this rank's number and the number of ranks to the cluster environment and to Lightning's logging."""
        environment, membership = self.cluster_environment, current_membership()
        rank = self.node_rank * self.num_processes + self.local_rank
        ranks = self.num_nodes * self.num_processes
        if membership is not None:
            rank = membership.me  # until it takes a place, a spare process has a number that no rank has
            if members := membership.current.members:  # others may be lost
                rank, ranks = members.index(membership.me), len(members)
        environment.set_global_rank(rank)
        environment.set_world_size(ranks)
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    def setup_distributed(self) -> None:
        """Connect the ranks, listen for failures, show once which rank runs where. Ranks: all, together."""
        reset_seed()
        self.set_world_ranks()
        self.supervisor.apply_threads(ranks_here=self.startup.ranks_on_these_cores(self))
        size_flight_recorder()
        timeout = self.settings.duration.total_seconds()
        connects_anew = self.supervisor.meet_again(timeout)
        is_new = self.startup.connect(self, self.settings.duration) and not connects_anew
        outcome.install_excepthook()  # again, because torch's process group has put its own hook in front of it
        # Rank 0 prints failure reports, and so does the first rank of each node that was started by hand.
        by_hand = isinstance(self.cluster_environment, LockstepEnvironment) and launcher_pid() is None
        communicator = self.supervisor.ranks_have_met(
            timeout, prints_report=self.global_rank == 0 or (by_hand and self.num_nodes > 1)
        )
        if communicator.world_size > 1:
            have_met(self.num_processes, self.num_nodes)
            membership = current_membership()
            if is_new and (membership is None or not membership.current.number):
                show_placement(communicator, self.root_device, self.supervisor.threads)
        self.startup.after_connect(self.supervisor)
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        """Take over loaders and what counts, and make a fit continue a resumed epoch and stop together under Slurm."""
        module = self.lightning_module
        # While members of a run meet, the model may still be without a Trainer, or have an earlier one.
        if module is None or module._trainer is None or module._trainer.strategy is not self:
            return
        trainer: Any = module.trainer
        if self.counting is None or self.counting.trainer is not trainer:
            # Lightning would give loaders another sampler, and make batch samplers anew. Here they come as they are.
            connector = trainer._accelerator_connector
            self.divides_loaders, connector.use_distributed_sampler = connector.use_distributed_sampler, False
            self.counting = Counting(trainer, self.settings.duration.total_seconds())
            self.counting.attach()
        self.begin_numbers(fits=trainer.state.fn == "fit")
        if trainer.state.fn != "fit":
            return
        LoaderPosition.attach(trainer)
        # Lightning saves and requeues in the signal handler of each rank, whatever the rank is doing. Ranks that are
        # in different collectives would then wait for each other.
        callback, callbacks = public("StopTogether"), trainer.callbacks
        given = any(isinstance(one, callback) for one in callbacks)
        if belongs_to_slurm(self.cluster_environment) and not given:
            callbacks.insert(0, callback())

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for every rank; after a failure, return at once."""
        if not self.failed:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def forget_loaders(self) -> None:
        """Forget the weights and the micro-batches of this run."""
        self.weights.clear()
        self.micro_batches = None

    def teardown(self) -> None:
        """Release what the run used; the ranks stay connected for a next call of the Trainer."""
        self.forget_loaders()
        super().teardown()
        if self.supervisor.propagation is not None:
            self.supervisor.propagation.leave_if_raised()

    # -- loaders ---------------------------------------------------------------------------------------

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
            part = shared_stream(
                dataloader,
                rank,
                ranks,
                trains=trains,
                ahead=lambda: trainer.accumulate_grad_batches if trains else 1,
            )
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
        lengths = [one[1:] for one in found]
        return self._uneven_inputs.even(part, trainer, communicator, lengths, trains=trains)

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a padding batch, which must contribute nothing."""
        if self.counting is None:
            return False
        return self.counting.is_padding or self._uneven_inputs.is_padding_batch(self.counting.trainer)

    # -- steps -----------------------------------------------------------------------------------------

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to this rank's device; ``None`` in training becomes an empty tuple, which has no step."""
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
        if self._uneven_inputs.ends_differ(trainer) or not _sizes_known(trainer):
            samples = 0 if is_padding or batch is _NO_BATCH else samples_in(batch)
        if not module.automatic_optimization:
            self.weights.of_manual_step(trainer, samples, communicator)
        with ExitStack() as stack:
            if is_padding:
                stack.enter_context(giving_nothing())
                self._put_back.append(StepCopies(module, but=self.global_norms).restore)
            stack.enter_context(self.drawing_at(self.place_of(batch)))
            if batch is _NO_BATCH:
                stack.enter_context(replaced(module, training_step=_no_step))
            if module.automatic_optimization and not self.needs_loss and communicator.world_size > 1:
                stack.enter_context(every_rank_contributes(self))
            output = super().training_step(*args, **kwargs)
        if module.automatic_optimization:
            self.weights.of_step(trainer, output, samples, communicator, is_padding=is_padding)
            if self.needs_loss:
                check_has_loss(output, self.needs_loss)
        return output

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

    # -- checkpoints -----------------------------------------------------------------------------------

    def whole_folder(self, target: str, *, on_each_node: bool = False) -> AbstractContextManager[str]:
        """Give a folder to write into, which becomes the checkpoint once all have written. Ranks: all, together."""
        return whole_folder(
            target,
            makes_folder=self.global_rank == 0 or (on_each_node and self.local_rank == 0),
            meet=self._meet,
            gather=current_communicator().gather,
        )

    def _meet(self) -> None:
        self.barrier()
        self.check_failure()  # a barrier does not wait once a rank has failed


def _mean_loss(closure: Callable[[], Any], weights: StepWeights, communicator: Communicator) -> Any:
    return weights.mean_loss(closure(), communicator)


def _sizes_known(trainer: Any) -> bool:
    """Return whether the samplers of the training loaders know the sizes of their batches."""
    combined = trainer.fit_loop._combined_loader
    parts = [] if combined is None else [parts_of(loader) for loader in combined.flattened]
    return all(one is None or one.sizes_known for one in parts)


def _no_step(*args: Any, **kwargs: Any) -> None:
    """Stand for the training step of a batch that is None."""
