"""Failures of one rank or of the whole run, each once, with each way of starting ranks once: the ends are those of
``tests/soak/rules.py``."""

from __future__ import annotations

import pytest

from tests.soak.plan import Plan
from tests.soak.run import check

# What can be told apart only in the program itself: tests/programs/strategies/test_failures.py.
PLANS = (
    Plan(1, "popen", 2, (), "kill", 0),
    Plan(2, "popen", 2, ("logging",), "stop", 1),
    Plan(3, "popen", 2, ("overflow", "early"), "ctrl_c", 0),
    Plan(4, "popen", 2, ("early",), "second_fit", 0),
    Plan(5, "popen", 2, (), "stderr", 0),
    Plan(6, "spawn", 2, ("overflow", "stop", "early", "logging"), "kill", 1),
    Plan(7, "fork", 2, ("early",), "term_rank", 1),
    Plan(10, "spawn", 2, ("stop",), "term_parent", 0),
)
MPI_PLANS = (
    Plan(8, "mpirun", 2, ("stop",), "term_parent", 0),
    Plan(9, "open_mpi", 2, ("logging",), "raise", 1),
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_run_ends_as_it_must(plan: Plan) -> None:
    check(plan)


@pytest.mark.mpi
@pytest.mark.parametrize("plan", MPI_PLANS, ids=str)
def test_a_run_over_mpi_ends_as_it_must(plan: Plan) -> None:
    check(plan)
