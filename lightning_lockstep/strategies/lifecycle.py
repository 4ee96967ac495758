"""The life of the ranks of a strategy: launch, rendezvous, placement, loaders, steps, failures and the end.

A strategy inherits from :class:`RankLifecycle` first and from one of Lightning's strategies second, so that the methods
here run around Lightning's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._lightning import (
    ClusterEnvironment,
    LightningModule,
    ParallelStrategy,
    Precision,
    Strategy,
    extract_batch_size,
    rank_zero_only,
    reset_seed,
)
from lightning_lockstep._registry import public, strategy_repr
from lightning_lockstep._settings import launcher_pid
from lightning_lockstep._trainer import asks_for_training_loader, given_to_trainer, weights_only_of_run
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.checkpoint_folder import whole_folder
from lightning_lockstep.distributed.failure.process_exit import outcome
from lightning_lockstep.distributed.guard.rank_state import size_flight_recorder
from lightning_lockstep.distributed.plain_data import load_without_objects
from lightning_lockstep.distributed.side_channel.zeromq import need_descriptors
from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    belongs_to_slurm,
    detect_environment,
)
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from lightning_lockstep.launchers.subprocess_script import check_ranks, have_met
from lightning_lockstep.loaders.evaluation import count_each_sample_once
from lightning_lockstep.loaders.global_order import check_samples, divided, marked, samples_in
from lightning_lockstep.loaders.streams import shared_stream
from lightning_lockstep.loaders.weights import StepWeights, samples_of_batch
from lightning_lockstep.numerics.precision import requested_precision, resolve_precision
from lightning_lockstep.stopping.loader_position import LoaderPosition
from lightning_lockstep.strategies.options import LifecycleSettings, show_placement
from lightning_lockstep.strategies.startup import RankStartup
from lightning_lockstep.strategies.uneven_inputs import UnevenInputs, check_has_loss, every_rank_contributes


class LockstepStrategy(Strategy):
    """Base of all strategies: an optimizer step is a mean over its samples or items, checkpoints are plain data."""

    #: Weights of the micro-batches in their optimizer step; a subclass sets it before it calls Lightning's constructor.
    weights: StepWeights
    __repr__ = strategy_repr

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss, weighted by its micro-batch's share of the samples in the optimizer step."""
        return super().backward(self.weights.weighted(closure_loss), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step."""
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            closure = self.weights.correcting(closure, optimizer, module.trainer.accumulate_grad_batches)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint as plain data unless ``weights_only=False``, without hyperparameters that are objects."""
        return load_without_objects(
            super().load_checkpoint, checkpoint_path, weights_only_of_run(weights_only)
        )


class RankLifecycle(LockstepStrategy, ParallelStrategy):
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
        super().__init__(cluster_environment=cluster_environment, **options)
        if cluster_environment is None:
            # Lightning uses an environment among the plugins only if the strategy has none, and without a plugin it
            # searches for one itself, which starts MPI. It raises if a strategy made before the Trainer has one too.
            plugins = given_to_trainer("plugins")
            several = plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
            given = (one for one in several if isinstance(one, ClusterEnvironment))
            self.cluster_environment = next(given, None) or detect_environment(mpi=self.trains_over_mpi)

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
        check_ranks(self.supervisor, self)
        if self.num_nodes == 1:
            need_descriptors(self.num_processes)  # only rank 0 needs them; with several nodes it checks later
        self.precision_plugin = self.resolve_precision(
            self.precision_plugin, requested_precision(), self.root_device.type
        )
        self._launcher = self.startup.launcher(self, self.supervisor)

    # -- the start, and the end ------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Give this rank's number and the number of ranks to the cluster environment and to Lightning's logging."""
        environment = self.cluster_environment
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = environment.global_rank()  # type: ignore[attr-defined]

    def setup_distributed(self) -> None:
        """Connect the ranks, listen for failures, show once which rank runs where. Ranks: all, together."""
        reset_seed()
        self.set_world_ranks()
        self.supervisor.apply_threads(ranks_here=self.startup.ranks_on_these_cores(self))
        size_flight_recorder()
        is_new = self.startup.connect(self, self.settings.duration)
        outcome.install_excepthook()  # again, because torch's process group has put its own hook in front of it
        # Rank 0 prints failure reports, and so does the first rank of each node that was started by hand.
        by_hand = isinstance(self.cluster_environment, LockstepEnvironment) and launcher_pid() is None
        communicator = self.supervisor.ranks_have_met(
            prints_report=self.global_rank == 0 or (by_hand and self.num_nodes > 1)
        )
        if communicator.world_size > 1:
            have_met(self.num_processes, self.num_nodes)
            if is_new:
                show_placement(communicator, self.root_device, self.supervisor.threads)
        self.startup.after_connect(self.supervisor)
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        """Make evaluations count each sample once, and a fit continue a resumed epoch and stop together under Slurm."""
        if self.lightning_module is None:
            return
        trainer = self.lightning_module.trainer
        count_each_sample_once(trainer, self.settings.duration.total_seconds())
        if trainer.state.fn != "fit":
            return
        LoaderPosition.attach(trainer)
        # Lightning saves and requeues in the signal handler of each rank, whatever the rank is doing. Ranks that are
        # in different collectives would then wait for each other.
        callback, callbacks = public("StopTogether"), trainer.callbacks  # type: ignore[attr-defined]
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

    # -- loaders ---------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for the sampler that Lightning makes, by which :meth:`process_dataloader` recognizes it."""
        given = {"num_replicas": self.world_size, "rank": self.global_rank}
        trainer: Any = None if self.lightning_module is None else self.lightning_module.trainer
        if trainer is None or trainer.overfit_batches:
            return given
        return marked(given, predicts=bool(trainer.predicting))

    def process_dataloader(self, dataloader: object) -> object:
        """Give this rank its part, and all ranks the same number of training batches. Ranks: all; a gather."""
        if self.lightning_module is None:
            return dataloader
        trainer, communicator = self.lightning_module.trainer, current_communicator()
        rank, ranks, trains = self.global_rank, self.world_size, asks_for_training_loader(trainer)
        if self.settings.iterable_datasets == "shard":
            # The weight of a micro-batch depends on the sizes of all micro-batches in its optimizer step.
            dataloader = shared_stream(
                dataloader,
                communicator,
                rank=rank,
                ranks=ranks,
                ahead=lambda: trainer.accumulate_grad_batches if trains else 1,
            )
        sizes = self.micro_batches if trains else None
        part = divided(dataloader, rank=rank, ranks=ranks, trains=trains, micro_batches=sizes)
        if part is dataloader:
            return self._uneven_inputs.even(dataloader, trainer, communicator)
        check_samples(communicator.gather(samples_in(part)))
        return part

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a padding batch, which must contribute nothing."""
        if self.lightning_module is None:
            return False
        trainer = self.lightning_module.trainer
        sizes = samples_of_batch(trainer, trainer.fit_loop.epoch_loop.batch_idx)
        return self._uneven_inputs.is_padding_batch(trainer) if sizes is None else sizes[0] == 0

    # -- steps -----------------------------------------------------------------------------------------

    @property
    def needs_loss(self) -> str:
        """Why every rank's step must return a loss; empty if a step without one contributes zero gradients."""
        return ""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, in which every rank contributes to the reductions."""
        trainer, communicator = self._module.trainer, current_communicator()
        if not self._module.automatic_optimization:
            self.weights.of_manual_step(trainer, communicator.world_size)
            return super().training_step(*args, **kwargs)
        with nullcontext() if self.needs_loss else every_rank_contributes(self):
            output = super().training_step(*args, **kwargs)
        samples, is_padding = None, self.is_padding_batch()
        if self._uneven_inputs.ends_differ(trainer):
            samples = 0 if is_padding else extract_batch_size([*args, *kwargs.values()][0])
        self.weights.of_step(trainer, output, samples, communicator, is_padding=is_padding)
        if self.needs_loss:
            check_has_loss(output, self.needs_loss)
        return output

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step. Ranks: for LBFGS all, together; an all-reduce each time it asks for the loss."""
        if isinstance(optimizer, torch.optim.LBFGS) and current_communicator().world_size > 1:
            closure = partial(_mean_loss, closure)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step, unless the run is to stop."""
        self.supervisor.at_step_boundary()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step, unless the run is to stop."""
        self.supervisor.at_step_boundary()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's prediction step, unless the run is to stop."""
        self.supervisor.at_step_boundary()
        return super().predict_step(*args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over all ranks. Ranks: all, together."""
        # Lightning divides a logged mean by the ranks' mean number of samples, which would be cut to a whole number.
        if (
            isinstance(tensor, Tensor)
            and not tensor.dtype.is_floating_point
            and reduce_op in ("mean", "avg", None)
        ):
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


def _mean_loss(closure: Callable[[], Any]) -> Any:
    """Return the mean loss of all ranks, so that LBFGS takes the same decisions on each."""
    loss = closure()
    if not isinstance(loss, torch.Tensor):
        return loss
    communicator = current_communicator()
    # In double precision, so that the mean of the losses is as exact as the loss of the whole batch.
    total = communicator.all_reduce(loss.detach().to("cpu", torch.float64, copy=True))
    return (total / communicator.world_size).to(loss)
