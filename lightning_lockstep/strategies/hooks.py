"""What every strategy of this package does where Lightning calls it: it hands over to its :class:`RankLifecycle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_lockstep._doors.lightning import ClusterEnvironment, ParallelStrategy
from lightning_lockstep._doors.lightning_internals import given_to_trainer
from lightning_lockstep.launchers.environments import detect_environment
from lightning_lockstep.strategies.lifecycle import RankLifecycle

# -- The cluster environment that a strategy uses: given to it, given to the Trainer as a plugin, or
# detected


# Where a strategy keeps its environment, and whether that gives way to a plugin.
_STATE = "lockstep_environment"


class GivenEnvironment:
    """The attribute ``cluster_environment`` of a strategy that detects its environment itself.

    Lightning sets a strategy's environment only where it has none, and refuses a plugin beside one. So while a Trainer
    with such a plugin is under construction, a detected environment is not shown, and the plugin takes its place.
    One that was given to the strategy stays, and Lightning says that there are two.
    """

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


# -- What every strategy of this package does where Lightning calls it: it hands over to its
# :class:`RankLifecycle`


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
