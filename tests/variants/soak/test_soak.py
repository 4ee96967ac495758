"""Failures and ways of starting ranks that are not in ``tests/programs/soak``: the ends are those of the rules."""

from __future__ import annotations

import pytest

from tests.programs.soak import test_soak
from tests.soak.plan import CALLBACKS, FAULTS, LAUNCHES, Plan
from tests.soak.run import check, launches_here

# Not the fault `memory`: libzmq ends a process that gets none itself, so how such a run ends is a matter of chance.
PLANS = (
    Plan(11, "popen", 2, (), "none", 0),
    Plan(12, "torchrun", 2, ("logging",), "raise", 0),
    Plan(13, "popen", 3, ("early",), "raise_all", 0),
    Plan(14, "fork", 2, CALLBACKS, "ours", 1),
    Plan(15, "spawn", 2, (), "exit", 1),
    Plan(16, "torchrun", 2, (), "kill", 1),
    Plan(17, "fork", 2, ("logging",), "stop", 0),
    Plan(18, "spawn", 2, ("early",), "stop_short", 1),
    Plan(19, "popen", 2, ("overflow",), "nan", 1),
    Plan(20, "torchrun", 2, ("early",), "slow", 1),
    Plan(21, "fork", 3, ("early",), "holds_gil", 2),
    Plan(22, "fork", 2, CALLBACKS, "uneven", 1),
    Plan(23, "popen", 2, ("logging",), "disk", 0),
    Plan(24, "spawn", 2, (), "folder", 0),
    Plan(25, "popen", 2, CALLBACKS, "stdout", 0),
    Plan(26, "fork", 3, (), "stderr_raise", 1),
    Plan(27, "fork", 3, CALLBACKS, "stranger", 2),
    Plan(28, "torchrun", 2, ("stop",), "usr1_rank", 1),
    Plan(29, "spawn", 2, (), "usr1_parent", 0),
    Plan(30, "fork", 2, CALLBACKS, "ctrl_c", 1),
    Plan(31, "popen", 2, (), "ctrl_c_twice", 0),
    Plan(32, "popen", 2, ("stop",), "term_parent", 0),
    Plan(34, "fork", 2, ("stop",), "usr1_parent", 0),
)
MPI_PLANS = (
    Plan(41, "mpirun", 2, (), "ours", 1),
    Plan(42, "mpirun", 2, ("overflow",), "kill", 0),
    Plan(45, "mpirun", 2, ("stop",), "usr1_parent", 0),
    Plan(43, "open_mpi", 2, CALLBACKS, "ctrl_c", 0),
    Plan(44, "mpich", 2, ("early",), "raise_all", 1),
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_run_ends_as_it_must(plan: Plan) -> None:
    check(plan)


@pytest.mark.mpi
@pytest.mark.parametrize("plan", MPI_PLANS, ids=str)
def test_a_run_over_mpi_ends_as_it_must(plan: Plan) -> None:
    if reason := launches_here()[plan.launch]:
        pytest.skip(reason)
    check(plan)


def test_each_fault_and_each_way_of_starting_ranks_has_a_run() -> None:
    plans = (*PLANS, *MPI_PLANS, *test_soak.PLANS, *test_soak.MPI_PLANS)
    assert {plan.fault for plan in plans} == {*FAULTS} - {"memory"}
    assert {plan.launch for plan in plans} == {*LAUNCHES}
