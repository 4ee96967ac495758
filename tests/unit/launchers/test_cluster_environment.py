"""Who started the ranks, and whether the Trainer has as many devices as there are ranks."""

from __future__ import annotations

import pytest

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    SlurmStepEnvironment,
    check_has_device,
    check_srun_is_used,
)
from lightning_lockstep.launchers.rank_variables import SlurmStep


class ElasticEnvironment(LockstepEnvironment):
    """A second rank that somebody else has started, who says nothing of the number of devices."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return 1


def second_of_three() -> SlurmStepEnvironment:
    step = SlurmStep(
        job="7",
        step="0",
        restarts="0",
        rank=1,
        size=3,
        local_rank=1,
        node=0,
        tasks_per_node=(2, 1),
        nodes="n",
    )
    return SlurmStepEnvironment(step)


def test_a_rank_without_a_device_is_told_what_srun_has_started() -> None:
    with pytest.raises(LaunchError, match=r"srun +3 +2\+1 +2"):
        check_has_device(second_of_three(), num_devices=1, num_nodes=3)


def test_a_rank_without_a_device_is_told_how_many_there_are() -> None:
    with pytest.raises(LaunchError, match="devices=1, but at least 2 ranks were started on this node"):
        check_has_device(ElasticEnvironment(), num_devices=1, num_nodes=1)


def test_a_rank_with_a_device_goes_on() -> None:
    check_has_device(ElasticEnvironment(), num_devices=2, num_nodes=1)
    check_has_device(LockstepEnvironment(), num_devices=1, num_nodes=1)


SCRIPT = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (SCRIPT, True),
        ({**SCRIPT, "SLURM_JOB_NUM_NODES": "1"}, False),
        ({**SCRIPT, "LOCAL_RANK": "1"}, False),
        ({**SCRIPT, "SLURM_STEP_NUM_TASKS": "4"}, False),
        ({**SCRIPT, "GROUP_RANK": "0"}, False),
        ({**SCRIPT, "SLURM_JOB_NAME": "bash"}, False),
    ],
)
def test_a_batch_script_without_srun_says_that_other_nodes_are_not_used(
    environ: dict[str, str], says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    check_srun_is_used(1, environ)
    said = capsys.readouterr().err
    assert ("Slurm job 7 has 2 nodes, but its batch script has started this program once" in said) == says
    assert says or not said


def test_a_batch_script_without_srun_is_refused_where_other_nodes_are_waited_for() -> None:
    with pytest.raises(LaunchError, match=r"num_nodes=2, but the batch script of Slurm job 7 \(2 nodes\)"):
        check_srun_is_used(2, SCRIPT)
