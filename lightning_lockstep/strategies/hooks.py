"""What every strategy of this package does where Lightning calls it: it hands over to its :class:`RankLifecycle`."""

from __future__ import annotations

from typing import Any

from lightning_lockstep._lightning import ClusterEnvironment, ParallelStrategy
from lightning_lockstep.launchers.environments.cluster_environment import detect_environment
from lightning_lockstep.strategies.given_environment import GivenEnvironment
from lightning_lockstep.strategies.lifecycle import RankLifecycle

__all__ = ["LifecycleHooks"]


class LifecycleHooks(ParallelStrategy):
    """Base of strategies of one process a device, in front of one of Lightning's strategies.

    A class sets ``lifecycle`` before it calls the constructor of Lightning's, and afterwards
    :meth:`detect_unless_given`.
    """

    lifecycle: RankLifecycle
    cluster_environment: Any = GivenEnvironment()

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

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which a fault stops it before any rank.
        GivenEnvironment.settle(self)
        self._launcher = self.lifecycle.launcher()

    def setup_distributed(self) -> None:
        """Make the process group, open the side channel and show which rank runs where."""
        self.lifecycle.connect()

    def process_dataloader(self, dataloader: object) -> object:
        """Make every rank take the same number of training batches."""
        return self.lifecycle.process_dataloader(super().process_dataloader(dataloader))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, in which every rank contributes to the reductions."""
        with self.lifecycle.contributing():
            return super().training_step(*args, **kwargs)

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
