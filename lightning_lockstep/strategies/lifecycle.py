"""The life of the ranks of a strategy: launch, rendezvous, placement, failures and the end.

A strategy inherits from :class:`RankLifecycle` first and from one of Lightning's strategies second, so that the methods
here run around Lightning's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_lockstep._lightning import ClusterEnvironment, Precision, rank_zero_only, reset_seed
from lightning_lockstep._registry import public
from lightning_lockstep._settings import launcher_pid
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.distributed.failure.members import current_membership
from lightning_lockstep.distributed.failure.process_exit import exit_plan
from lightning_lockstep.distributed.guard.rank_state import size_flight_recorder
from lightning_lockstep.distributed.side_channel.zeromq import need_descriptors
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.environments import LockstepEnvironment, belongs_to_slurm
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, apply_threads
from lightning_lockstep.launchers.subprocess_script import check_ranks, have_met
from lightning_lockstep.loaders.loader_position import LoaderPosition
from lightning_lockstep.numerics.precision import requested_precision, resolve_precision
from lightning_lockstep.steps.snapshot import seed_generators
from lightning_lockstep.strategies.counted_steps import CountedSteps
from lightning_lockstep.strategies.options import show_placement
from lightning_lockstep.strategies.startup import RankStartup


class RankLifecycle(CountedSteps):
    """Base of strategies with one process per device."""

    trains_over_mpi = False  # whether ranks of ``srun --mpi=...`` are ranks of an MPI job
    cluster_environment: Any
    num_nodes: int

    def __init__(
        self, startup: RankStartup, *, cluster_environment: ClusterEnvironment | None = None, **options: Any
    ) -> None:
        # The subclass has set ``settings``.
        self.startup, self.supervisor = startup, RankSupervisor(self.settings)
        super().__init__(cluster_environment=cluster_environment, **options)
        if cluster_environment is None:
            # Lightning uses an environment among the plugins only if the strategy has none, and without a plugin it
            # searches for one itself, which starts MPI. It raises if a strategy made before the Trainer has one too.
            plugins = given_to_trainer("plugins")
            several = plugins if isinstance(plugins, Sequence) and not isinstance(plugins, str) else [plugins]
            given = (one for one in several if isinstance(one, ClusterEnvironment))
            self.cluster_environment = next(given, None) or startup.environment(mpi=self.trains_over_mpi)

    # -- which ranks there are, and whether one has failed --

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
    def failed(self) -> bool:
        """Whether a rank has failed, after which no rank may wait for another."""
        return self.supervisor.propagation is not None and self.supervisor.propagation.attempt.has_failure

    def check_failure(self) -> None:
        """Raise if another rank has failed, or if all ranks are to raise an error of the guard."""
        if self.supervisor.propagation is not None:
            self.supervisor.propagation.check()

    # -- while the Trainer is under construction: an error here ends the program before any rank starts --

    def resolve_precision(self, plugin: Precision, requested: str | None, device_type: str) -> Precision:
        """Return the precision plugin to use, by Lightning's and the name that the user gave, or raise."""
        return resolve_precision(plugin, requested, device_type)

    def _configure_launcher(self) -> None:
        exit_plan.install_excepthook()
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
        self.draw_apart(trainer)

    def draw_apart(self, trainer: Any) -> None:
        """Let the random numbers of a fit follow seed and rank. Ranks: each, alone."""
        if trainer.state.fn == "fit" and self.global_rank:
            # All ranks have drawn alike so far; rank 0 goes on as one process does.
            seed_generators(int(torch.randint(2**31, ())) + self.global_rank)

    # -- the start, and the end --

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
        ranks_here = self.startup.ranks_on_these_cores(self)
        threads = apply_threads(self.settings.threads_per_rank, ranks_here=ranks_here)
        size_flight_recorder()
        timeout = self.settings.duration.total_seconds()
        connects_anew = self.supervisor.meet_again(timeout)
        is_new = self.startup.connect(self, self.settings.duration) and not connects_anew
        exit_plan.install_excepthook()  # again, because torch's process group has put its own hook in front of it
        # Rank 0 prints failure reports, and so does the first rank of each node that was started by hand.
        by_hand = isinstance(self.cluster_environment, LockstepEnvironment) and launcher_pid() is None
        communicator = self.supervisor.ranks_have_met(
            timeout, prints_report=self.global_rank == 0 or (by_hand and self.num_nodes > 1)
        )
        if communicator.world_size > 1:
            have_met(self.num_processes, self.num_nodes)
            membership = current_membership()
            if is_new and (membership is None or not membership.current.number):
                show_placement(communicator, self.root_device, threads)
        self.startup.after_connect(self.supervisor)
        self._add_callbacks()

    def _add_callbacks(self) -> None:
        """Take over loaders and what counts, and make a fit continue a resumed epoch and stop together under Slurm."""
        module = self.lightning_module
        # While members of a run meet, the model may still be without a Trainer, or have an earlier one.
        if module is None or module._trainer is None or module._trainer.strategy is not self:
            return
        trainer: Any = module.trainer
        self.begin_counting(trainer)
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

    def teardown(self) -> None:
        """Release what the run used; the ranks stay connected for a next call of the Trainer."""
        self.forget_loaders()
        super().teardown()
        self.supervisor.leave_if_raised()

    def teardown_in_place(self) -> None:
        """Release what the run used, as :meth:`teardown`, but move no tensor. Ranks: every rank; waits for none."""
        self.forget_loaders()
        for used in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if used is not None:
                used.teardown()
        self.supervisor.leave_if_raised()
