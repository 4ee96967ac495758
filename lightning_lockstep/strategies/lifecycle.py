"""The life cycle of the ranks of a strategy, by composition: any strategy gets all of it by holding one object.

A strategy need not inherit from DDP. It calls its :class:`RankLifecycle` where Lightning calls the strategy::

    from lightning_lockstep.launchers import detect_environment
    from lightning_lockstep.strategies import LifecycleSettings, RankLifecycle

    class OwnStrategy(ParallelStrategy):
        def __init__(self, **options):
            super().__init__(cluster_environment=detect_environment())
            self.lifecycle = RankLifecycle(self, LifecycleSettings(**options))

        def _configure_launcher(self):
            self._launcher = self.lifecycle.launcher()

        def setup_environment(self):
            super().setup_environment()
            self.lifecycle.connect()

        def process_dataloader(self, dataloader):
            return self.lifecycle.process_dataloader(super().process_dataloader(dataloader))

        def training_step(self, *args, **kwargs):
            with self.lifecycle.contributing():
                return super().training_step(*args, **kwargs)

        def barrier(self, name=None):
            if not self.lifecycle.failed:
                ...

        def teardown(self):
            self.lifecycle.teardown()
            super().teardown()

At the end of the file: :class:`LifecycleHooks`, which does so where Lightning calls a strategy of this package.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
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
    _destroy_dist_connection,
    extract_batch_size,
    rank_zero_only,
    reset_seed,
)
from lightning_lockstep._registry import public, strategy_repr
from lightning_lockstep._settings import launcher_pid
from lightning_lockstep._text import say
from lightning_lockstep._trainer import asks_for_training_loader, given_to_trainer, weights_only_of_run
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.distributed.checkpoint_folder import whole_folder
from lightning_lockstep.distributed.failure.process_exit import at_exit, outcome
from lightning_lockstep.distributed.guard.records import size_flight_recorder
from lightning_lockstep.distributed.plain_data import load_without_objects, objects_in_checkpoint
from lightning_lockstep.distributed.process_group import (
    default_backend,
    process_group_exists,
    start_process_group,
)
from lightning_lockstep.distributed.side_channel.zeromq import need_descriptors
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import (
    AloneEnvironment,
    LockstepEnvironment,
    belongs_to_slurm,
    check_has_device,
    check_srun_is_used,
    detect_environment,
    hide_srun_hint,
)
from lightning_lockstep.launchers.multiprocessing import SpawnedLauncher
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher, connected_rank
from lightning_lockstep.loaders.evaluation import count_each_sample_once
from lightning_lockstep.loaders.global_order import check_samples, divided, marked, samples_in
from lightning_lockstep.loaders.streams import shared_stream
from lightning_lockstep.loaders.weights import StepWeights, samples_of_batch
from lightning_lockstep.numerics.precision import requested_precision, resolve_precision
from lightning_lockstep.stopping.loader_position import LoaderPosition
from lightning_lockstep.strategies.options import (
    LifecycleSettings,
    mixed_gpus_warning,
    placement_of,
    show_placement,
)
from lightning_lockstep.strategies.uneven_inputs import UnevenInputs, every_rank_contributes
from lightning_lockstep.xla.runtime import check_xla_untouched

_log = logging.getLogger(__name__)


class RankStartup:
    """How the ranks of a strategy are started and connected: by this program, over a backend of torch."""

    # Another way overrides these methods, as :mod:`lightning_lockstep.strategies.mpi` does.

    script_launcher: type[ScriptLauncher] = ScriptLauncher

    def __init__(self, start_method: str = "popen", backend: str | None = None) -> None:
        # Start method: popen, spawn, fork or forkserver; no backend: that of the device.
        self.start_method, self.backend = start_method, backend

    def adopt_ranks(self, strategy: Any) -> None:
        """Take over from the program that started the ranks how many there are, before the launch."""

    def launcher(self, strategy: Any, supervisor: RankSupervisor) -> Any:
        """Return the launcher that starts the ranks of this node."""
        environment, connected = strategy.cluster_environment, connected_rank() or (0, 1)
        # Ranks that are connected run this script, and come here too: they are used again.
        exist = environment.creates_processes_externally or connected[1] > 1
        if self.start_method == "popen" or exist:
            return self.script_launcher(
                supervisor,
                environment,
                num_processes=strategy.num_processes,
                num_nodes=strategy.num_nodes,
            )
        if self.start_method == "fork":
            check_xla_untouched()
        return SpawnedLauncher(strategy, supervisor, start_method=self.start_method)  # type: ignore[arg-type]

    def share_of_cores(self, strategy: Any) -> tuple[int, int]:
        """Return which of the ranks that share the cores of this node this one is, and how many those are."""
        return strategy.local_rank, strategy.num_processes

    def connect(self, strategy: Any, timeout: timedelta) -> bool:
        """Connect this rank with the others, and return whether it was not connected before."""
        # Ranks without a process group of torch (XLA) give the run's group by
        # ``distributed.process_group.use_group`` here instead.
        is_new = not process_group_exists()
        self.backend = self.backend or default_backend(strategy.root_device)
        start_process_group(
            self.backend,
            rank=strategy.global_rank,
            world_size=strategy.world_size,
            address=strategy.cluster_environment.main_address,
            port=strategy.cluster_environment.main_port,
            timeout=timeout,
            device=self.device_of_group(strategy),
            name=getattr(strategy.cluster_environment, "rendezvous_name", None),
        )
        if is_new and "nccl" in self.backend:  # which warns at exit of what nobody has destroyed
            at_exit(_destroy_dist_connection)
        return is_new

    def device_of_group(self, strategy: Any) -> torch.device:
        """Return the device whose tensors the process group of torch carries."""
        device: torch.device = strategy.root_device
        return device

    def after_connect(self, supervisor: RankSupervisor) -> None:
        """Do what has to follow once the ranks are connected and failures propagate."""


class RankLifecycle:
    """Launch, precision, CPU threads, rendezvous, placement table, uneven inputs and failures of a strategy's ranks."""

    # `strategy`: one of Lightning's with `num_nodes` and `num_processes`, the ranks per node. `precision`: returns the
    # plugin to use, given Lightning's, the name the user gave and the type of the device, or raises.

    def __init__(
        self,
        strategy: Any,
        settings: LifecycleSettings,
        *,
        startup: RankStartup | None = None,
        precision: Callable[[Precision, str | None, str], Precision] = resolve_precision,
    ) -> None:
        self.settings = settings
        self.startup = startup or RankStartup(settings.start_method)
        self.supervisor = RankSupervisor(settings.supervisor)
        self._uneven_inputs = UnevenInputs(settings.uneven_inputs)
        self.weights = StepWeights()
        # Samples of all ranks in each micro-batch of an optimizer step, if something has set them.
        self.micro_batches: tuple[int, ...] | None = None
        # The place of this rank among those that divide loaders, and their number.
        self._share: tuple[int, int] | None = None
        self._strategy, self._precision = strategy, precision
        self.last_checkpoint = ""  # that this run has saved

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, after which no rank may wait for another."""
        propagation, guard = self.supervisor.propagation, self.supervisor.guard
        failed = propagation is not None and propagation.failed
        return failed or (guard is not None and guard.error is not None)

    def check(self) -> None:
        """Raise if another rank has failed, or if all ranks are to raise an error of the guard."""
        guard = self.supervisor.guard
        if guard is not None and guard.error is not None:
            raise guard.error
        if self.supervisor.propagation is not None:
            self.supervisor.propagation.check()

    def launcher(self) -> Any:
        """Resolve the precision and return the launcher, while the Trainer is under construction."""
        strategy, connected = self._strategy, connected_rank()
        outcome.install_excepthook()
        hide_srun_hint()
        self.startup.adopt_ranks(strategy)
        if connected and connected[1] > 1 == strategy.num_processes * strategy.num_nodes:
            self._alone_as(connected[0])
        elif isinstance(strategy.cluster_environment, LockstepEnvironment):
            check_srun_is_used(strategy.num_nodes)
        size = {"num_devices": strategy.num_processes, "num_nodes": strategy.num_nodes}
        if not self._alone:
            try:
                check_has_device(strategy.cluster_environment, **size, connected=connected)
            except LaunchError as error:
                self.supervisor.refuse(error)
        if strategy.num_nodes == 1:
            need_descriptors(strategy.num_processes)  # else rank 0, which is elsewhere perhaps, finds out
        strategy.precision_plugin = self._precision(
            strategy.precision_plugin, requested_precision(), strategy.root_device.type
        )
        return self.startup.launcher(strategy, self.supervisor)

    def _alone_as(self, rank: int) -> None:
        """Let each of the connected ranks run this Trainer of one device alone; ``rank`` is this one."""
        strategy = self._strategy
        if not getattr(strategy, "runs_alone", False):
            return
        if strategy.parallel_devices[0].type == "cuda":  # that of the earlier Trainer: all have one
            strategy.parallel_devices = [torch.device("cuda", torch.cuda.current_device())]
        strategy.cluster_environment = AloneEnvironment(rank)

    @property
    def _alone(self) -> bool:
        return isinstance(self._strategy.cluster_environment, AloneEnvironment)

    def connect(self) -> Communicator:
        """Connect the ranks, listen for failures, show once which rank runs where. Ranks: all, together."""
        reset_seed()
        self.last_checkpoint = ""
        self.set_world_ranks()
        if not self._alone:  # else as before: the other ranks compute too
            place, sharing = self.startup.share_of_cores(self._strategy)
            self.supervisor.apply_threads(local_rank=place, local_world_size=sharing)
        size_flight_recorder()
        is_new = self.startup.connect(self._strategy, self.settings.duration)
        outcome.install_excepthook()  # in front again: a process group of torch puts its own hook there
        communicator = self.supervisor.ranks_have_met(prints_report=self._prints_report())
        if is_new and communicator.world_size > 1:
            self._show_placement(communicator)
        self.startup.after_connect(self.supervisor)
        self._add_callbacks()
        return communicator

    def set_world_ranks(self) -> None:
        """Give this rank's number and the number of ranks to the cluster environment and to Lightning's logging."""
        strategy, environment = self._strategy, self._strategy.cluster_environment
        environment.set_global_rank(strategy.node_rank * strategy.num_processes + strategy.local_rank)
        environment.set_world_size(strategy.num_nodes * strategy.num_processes)
        alone = isinstance(environment, AloneEnvironment)
        rank_zero_only.rank = environment.connected_rank if alone else environment.global_rank()  # type: ignore[attr-defined]

    def sampler_kwargs(self, given: Mapping[str, int]) -> dict[str, int]:
        """Return what Lightning makes a sampler with: one that :meth:`process_dataloader` knows again and divides."""
        module = self._strategy.lightning_module
        trainer = None if module is None else module.trainer
        if trainer is None or trainer.overfit_batches:
            return dict(given)
        self._share = given["rank"], given["num_replicas"]
        return marked(given, predicts=bool(trainer.predicting))

    def process_dataloader(self, dataloader: object) -> object:
        """Give this rank its part of a loader, and all ranks as many batches. Ranks: all; a gather."""
        module = self._strategy.lightning_module
        if module is None:
            return dataloader
        trains = asks_for_training_loader(module.trainer)
        if self.settings.iterable_datasets == "shard":
            dataloader = self._shared_stream(dataloader, module.trainer, trains)
        if self._share is not None:
            rank, ranks = self._share
            sizes = self.micro_batches if trains else None
            divided_loader = divided(dataloader, rank=rank, ranks=ranks, trains=trains, micro_batches=sizes)
            if divided_loader is not dataloader:
                check_samples(current_communicator().gather(samples_in(divided_loader)))
                return divided_loader
        return self._uneven_inputs.even(dataloader, module.trainer, current_communicator())

    def _shared_stream(self, dataloader: object, trainer: Any, trains: bool) -> Any:
        """Give this rank its part of a stream. Ranks: all; a gather."""
        # Lightning asks for them for data with an index alone.
        given = self._strategy.distributed_sampler_kwargs
        rank, ranks = self._share or (given["rank"], given["num_replicas"])
        return shared_stream(
            dataloader,
            current_communicator(),
            rank=rank,
            ranks=ranks,
            trains=trains,
            micro_batches=self.micro_batches if trains else None,
            # What a micro-batch counts goes by the sizes of all in its optimizer step.
            ahead=lambda: trainer.accumulate_grad_batches if trains else 1,
        )

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a padding batch, which must contribute nothing."""
        module = self._strategy.lightning_module
        if module is None:
            return False
        sizes = samples_of_batch(module.trainer, module.trainer.fit_loop.epoch_loop.batch_idx)
        return self._uneven_inputs.is_padding_batch(module.trainer) if sizes is None else sizes[0] == 0

    def weigh(self, output: Any, batch: Any) -> None:
        """Find what the loss of a micro-batch counts, which has had its forward. Ranks: all, if they count items."""
        trainer, is_padding = self._strategy.lightning_module.trainer, self.is_padding_batch()
        samples = None
        if self._uneven_inputs.ends_differ(trainer):
            samples = 0 if is_padding else extract_batch_size(batch)
        self.weights.of_step(trainer, output, samples, current_communicator(), is_padding=is_padding)

    def contributing(self) -> AbstractContextManager[None]:
        """Let every rank take part in the reductions of the training step that runs in this context."""
        module = self._strategy.lightning_module
        if module is None or not module.automatic_optimization:
            return nullcontext()
        return every_rank_contributes(self._strategy)

    def whole_folder(self, target: str) -> AbstractContextManager[str]:
        """Give a folder to write into, which is a checkpoint once all ranks have written. Ranks: all, together."""
        self.last_checkpoint = target
        return whole_folder(
            target,
            rank=self._strategy.global_rank,
            is_first_of_node=self._strategy.local_rank == 0,
            meet=self._meet,
            gather=current_communicator().gather,
        )

    def _meet(self) -> None:
        self._strategy.barrier()
        self.check()  # a barrier does not wait once a rank has failed

    def teardown(self) -> None:
        """Forget the loaders of this run; the ranks stay connected for a next call of the Trainer."""
        self.weights.clear()
        self.micro_batches = None

    def _add_callbacks(self) -> None:
        """Have evaluations count each sample once, a fit continue a resumed epoch, and stop together under Slurm."""
        module = self._strategy.lightning_module
        if module is None:
            return
        trainer = module.trainer
        if trainer.world_size == current_communicator().world_size:  # else each rank evaluates alone
            count_each_sample_once(trainer, self.settings.duration.total_seconds())
        if trainer.state.fn != "fit":
            return
        LoaderPosition.attach(trainer)
        # Lightning saves and requeues inside the signal handler of each rank, wherever that rank is; ranks in
        # different places then wait for each other.
        callback = public("StopTogether")
        given = any(isinstance(one, callback) for one in trainer.callbacks)
        if belongs_to_slurm(self._strategy.cluster_environment) and not given:
            trainer.callbacks.insert(0, callback())

    def _prints_report(self) -> bool:
        """Return whether this rank prints failure reports: rank 0, and the first rank of a node started by hand."""
        strategy = self._strategy
        by_hand = isinstance(strategy.cluster_environment, LockstepEnvironment) and launcher_pid() is None
        return bool(strategy.global_rank == 0 or (by_hand and strategy.num_nodes > 1))

    def _show_placement(self, communicator: Communicator) -> None:
        placements = communicator.gather(
            placement_of(
                self._strategy.root_device,
                rank=communicator.rank,
                host=communicator.host,
                threads=self.supervisor.threads,
                cores=self.supervisor.cores,
            )
        )
        if communicator.is_main:
            show_placement(placements)
            warning = mixed_gpus_warning(placements)
            if warning:
                _log.warning(warning)


# -- The cluster environment that a strategy uses: given to it, given to the Trainer as a plugin, or
# detected

# Where a strategy keeps its environment, and whether that gives way to a plugin.
_STATE = "lockstep_environment"


class GivenEnvironment:
    """The attribute ``cluster_environment`` of a strategy that detects its environment itself."""

    # Lightning sets a strategy's environment only where it has none, and refuses a plugin otherwise. So
    # while a Trainer with such a plugin is under construction, a detected environment is not shown, and the
    # plugin takes its place. One that was given to the strategy stays, and Lightning says that there are two.

    def __get__(self, strategy: Any, owner: type | None = None) -> Any:
        if strategy is None:
            return self
        environment, is_detected = vars(strategy).get(_STATE, (None, False))
        return None if is_detected and _is_plugin_given() else environment

    def __set__(self, strategy: Any, environment: Any) -> None:
        vars(strategy)[_STATE] = environment, False

    @staticmethod
    def detected(strategy: Any, environment: ClusterEnvironment) -> None:
        """Set an environment that gives way to one of the Trainer's plugins."""
        vars(strategy)[_STATE] = environment, True

    @staticmethod
    def settle(strategy: Any) -> None:
        """Keep the environment that the strategy has now; the Trainer is about to use it."""
        vars(strategy)[_STATE] = strategy.cluster_environment, False


def _is_plugin_given() -> bool:
    plugins = given_to_trainer("plugins")
    several = isinstance(plugins, Sequence) and not isinstance(plugins, str)
    return any(isinstance(plugin, ClusterEnvironment) for plugin in (plugins if several else [plugins]))


def _mean_loss(closure: Callable[[], Any]) -> Any:
    """Return the mean over the ranks of what a closure returns, by which all decide the same."""
    loss = closure()
    if not isinstance(loss, torch.Tensor):
        return loss
    communicator = current_communicator()
    # In double precision, so that the mean of losses is as good as the loss of the whole batch.
    total = communicator.all_reduce(loss.detach().to("cpu", torch.float64, copy=True))
    return (total / communicator.world_size).to(loss)


# -- What every strategy of this package does where Lightning calls it: it hands over to its
# :class:`RankLifecycle`


class PlainCheckpoints(Strategy):
    """Base of strategies that read checkpoints as plain data, and say at the first save what is none."""

    _looked = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint."""
        self.look_at(checkpoint)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def look_at(self, checkpoint: Mapping[str, Any]) -> None:
        """Say once, on rank 0, what of a checkpoint will not load as plain data."""
        if not self._looked and self.is_global_zero:
            for sentence in objects_in_checkpoint(checkpoint):
                say(f"lightning-lockstep: {sentence}")
        self._looked = True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint as plain data unless ``weights_only=False``, without hyperparameters that are objects."""
        return load_without_objects(
            super().load_checkpoint, checkpoint_path, weights_only_of_run(weights_only)
        )


class WeightedSteps(Strategy):
    """Base of strategies whose optimizer steps are means over all of their samples, or items."""

    @property
    def weights(self) -> StepWeights:
        """What the loss of a micro-batch counts in its optimizer step."""
        raise NotImplementedError

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward of a loss, which counts as much as its micro-batch has of its optimizer step's samples."""
        return super().backward(self.weights.weighted(closure_loss), *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step."""
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            closure = self.weights.correcting(closure, optimizer, module.trainer.accumulate_grad_batches)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)


class LifecycleHooks(WeightedSteps, PlainCheckpoints, ParallelStrategy):
    """Base of strategies of one process a device, in front of one of Lightning's strategies."""

    # A class sets ``lifecycle`` before it calls the constructor of Lightning's, and afterwards
    # :meth:`detect_unless_given`.

    lifecycle: RankLifecycle
    #: Whether ranks that are connected may each run a Trainer of one device alone.
    runs_alone = True
    cluster_environment: Any = GivenEnvironment()
    __repr__ = strategy_repr

    @staticmethod
    def detect_environment() -> ClusterEnvironment:
        """Return the cluster environment of this process, by environment variables."""
        return detect_environment()

    def detect_unless_given(self, environment: ClusterEnvironment | None) -> None:
        """Use the detected cluster environment unless one was given."""
        if environment is None:
            GivenEnvironment.detected(self, self.detect_environment())

    @property
    def process_group_backend(self) -> str | None:
        """Name of the backend of the process group; ``None`` until the ranks are connected, if none was given."""
        return self.lifecycle.startup.backend

    @property
    def device_type(self) -> str:
        """Type of this rank's device, also before it is known whether the Trainer has one for it."""
        return (self.parallel_devices or [torch.device("cpu")])[0].type

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank writes files and prints: of ranks that each run a Trainer alone the first one."""
        environment = self.cluster_environment
        if isinstance(environment, AloneEnvironment):
            return environment.connected_rank == 0
        return super().is_global_zero

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which an error stops it before any rank.
        GivenEnvironment.settle(self)
        self._launcher = self.lifecycle.launcher()

    def setup_distributed(self) -> None:
        """Make the process group, open the side channel and show which rank runs where."""
        self.lifecycle.connect()

    def process_dataloader(self, dataloader: object) -> object:
        """Make every rank take the same number of training batches."""
        return self.lifecycle.process_dataloader(super().process_dataloader(dataloader))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """How Lightning makes the samplers of loaders, which are divided among the ranks afterwards."""
        return self.lifecycle.sampler_kwargs(super().distributed_sampler_kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, in which every rank contributes to the reductions."""
        if not self._module.automatic_optimization:
            self.lifecycle.weights.of_manual_step(self._module.trainer, current_communicator().world_size)
            return super().training_step(*args, **kwargs)
        with self.lifecycle.contributing():
            output = super().training_step(*args, **kwargs)
        self.lifecycle.weigh(output, [*args, *kwargs.values()][0])
        return output

    @property
    def weights(self) -> StepWeights:
        """See :attr:`WeightedSteps.weights`."""
        return self.lifecycle.weights

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step. Ranks: for LBFGS all, together; an all-reduce each time it asks for the loss."""
        if isinstance(optimizer, torch.optim.LBFGS) and current_communicator().world_size > 1:
            closure = partial(_mean_loss, closure)
        return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step, unless the run is to stop."""
        self.lifecycle.supervisor.at_step_boundary()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step, unless the run is to stop."""
        self.lifecycle.supervisor.at_step_boundary()
        return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's prediction step, unless the run is to stop."""
        self.lifecycle.supervisor.at_step_boundary()
        return super().predict_step(*args, **kwargs)

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a padding batch, which must contribute nothing."""
        return self.lifecycle.is_padding_batch()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a value over all ranks. Ranks: all, together."""
        # Lightning divides a logged mean by the mean of the ranks' samples, and cuts that to a whole number.
        if (
            isinstance(tensor, Tensor)
            and not tensor.dtype.is_floating_point
            and reduce_op in ("mean", "avg", None)
        ):
            tensor = tensor.float()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[safe-super]

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint on rank 0."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if "loops" in checkpoint:  # else it has weights alone
            self.lifecycle.last_checkpoint = str(filepath)

    def on_exception(self, exception: BaseException) -> None:
        """Say how to go on after a signal; callbacks have saved what they save after an exception."""
        super().on_exception(exception)
        self.lifecycle.supervisor.say_interruption(exception, self.lifecycle.last_checkpoint)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for every rank; after a failure, return at once."""
        if not self.lifecycle.failed:
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def teardown(self) -> None:
        """Release what the run used; the ranks stay connected for a next call of the Trainer."""
        self.lifecycle.teardown()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the package registers its strategies when it is imported."""
