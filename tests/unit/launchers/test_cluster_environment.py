"""Who started the ranks, and whether the Trainer has as many devices as there are ranks."""

from __future__ import annotations

import pytest

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    SlurmStepEnvironment,
    check_has_device,
)
from lightning_lockstep.launchers.rank_variables import StartedRank


class ElasticEnvironment(LockstepEnvironment):
    """A second rank that somebody else has started, who says nothing of the number of devices."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return 1


def second_of_three() -> SlurmStepEnvironment:
    step = StartedRank("srun", 1, 3, 1, 2, node=0, per_node=(2, 1), step="7.0.0@here", nodes="n")
    return SlurmStepEnvironment(step)


def test_a_rank_without_a_device_is_told_what_srun_has_started() -> None:
    with pytest.raises(LaunchError, match=r"3 were started, 2\+1 on each of 2 nodes"):
        check_has_device(second_of_three(), num_devices=1, num_nodes=3)


def test_a_rank_without_a_device_is_told_how_many_there_are() -> None:
    with pytest.raises(LaunchError, match="devices=1, but at least 2 ranks were started on this node"):
        check_has_device(ElasticEnvironment(), num_devices=1, num_nodes=1)
