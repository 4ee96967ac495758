"""The cluster environment that a strategy uses: given to it, given to the Trainer as a plugin, or detected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_lockstep._lightning import ClusterEnvironment
from lightning_lockstep._lightning.internals import given_to_trainer

__all__ = ["GivenEnvironment"]

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
