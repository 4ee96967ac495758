"""Each check is a function; findings and options survive JSON; checks are chosen by name."""

from __future__ import annotations

from lightning_lockstep.doctor.command import select
from lightning_lockstep.doctor.registry import CHECKS, Status, worst


def test_the_worst_status_counts() -> None:
    assert worst([]) is Status.NOT_APPLICABLE
    assert worst([Status.OK, Status.NOT_APPLICABLE]) is Status.OK
    assert worst([Status.OK, Status.PROBLEM, Status.WARNING]) is Status.PROBLEM


def test_checks_are_chosen_by_name() -> None:
    assert select(["kernel", "packages"]) == (["packages", "kernel"], [])
    assert select(["run", "a", "b"]) == (["run"], ["a", "b"])
    assert set(select([])[0]) == set(CHECKS) - {"network", "run"}
