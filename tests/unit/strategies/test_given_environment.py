"""Which cluster environment a strategy uses: its own, the Trainer's plugin, or the detected one."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.plugins.environments import KubeflowEnvironment, LightningEnvironment
from lightning.pytorch.strategies import Strategy

import lightning_lockstep  # noqa: F401  registers the strategies
from lightning_lockstep import LockstepDDPStrategy


class Pod(LightningEnvironment):
    """One pod of several, whose rank is in none of the variables that are looked at."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def global_rank(self) -> int:
        return 3


def trainer(strategy: str | Strategy, **options: object) -> pl.Trainer:
    return pl.Trainer(strategy=strategy, accelerator="cpu", logger=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lockstep_ddp", "lockstep_ddp_spawn", "lockstep_mpi"])
def test_a_plugin_wins_over_what_is_detected_by_name(name: str) -> None:
    pod = Pod()
    made = trainer(name, plugins=[pod])
    assert made.strategy.cluster_environment is pod  # type: ignore[attr-defined]
    assert made.global_rank == 3


def test_two_that_were_given_are_refused_and_none_is_detected() -> None:
    for strategy in (LockstepDDPStrategy(cluster_environment=Pod()), LockstepDDPStrategy()):
        with pytest.raises(MisconfigurationException, match="choose one"):
            trainer(strategy, plugins=[KubeflowEnvironment()])
    own = LockstepDDPStrategy()
    assert own.cluster_environment is not None
    assert trainer(own).strategy.cluster_environment is own.cluster_environment  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [None, True, False])
@pytest.mark.parametrize(
    ("method", "start"), [("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")]
)
def test_names_say_how_ranks_start_and_whether_parameters_are_unused(
    method: str, start: str, value: bool | None
) -> None:
    ending = "" if value is None else f"_find_unused_parameters_{str(value).lower()}"
    made = trainer(f"lockstep_ddp{method}{ending}")
    assert isinstance(made.strategy, LockstepDDPStrategy)
    assert made.strategy.settings.start_method == start
    assert made.strategy._ddp_kwargs.get("find_unused_parameters") is value
