"""The table of checks agrees with the checks; results survive JSON; imitated machines answer as real ones do."""

from __future__ import annotations

import json

import pytest

from lightning_lockstep.doctor.command import select
from lightning_lockstep.doctor.registry import (
    BUILT_IN,
    CheckOptions,
    CheckResult,
    Finding,
    Status,
    load_check,
    worst,
)
from lightning_lockstep.errors import ConfigurationError


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_table_agrees_with_the_check(name: str) -> None:
    check = load_check(name)
    assert (check.name, check.summary) == (name, BUILT_IN[name])
    assert len(check.why.split()) > 20 and check.timeout > 0


def test_results_and_options_survive_json() -> None:
    result = CheckResult(
        "cuda", (Finding(Status.PROBLEM, "a", "b", ("c", "d")), Finding(Status.OK, "e", "f")), 1.5
    )
    assert CheckResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    options = CheckOptions(timeout=3.0, hosts=("a", "b"), folders=("x",))
    assert CheckOptions.from_json(json.loads(json.dumps(options.to_json()))) == options


def test_the_worst_status_counts() -> None:
    assert worst([]) is Status.NOT_APPLICABLE
    assert worst([Status.OK, Status.NOT_APPLICABLE]) is Status.OK
    assert worst([Status.OK, Status.PROBLEM, Status.WARNING]) is Status.PROBLEM


def test_checks_are_chosen_by_name() -> None:
    assert select(["kernel"]).names == ("kernel",)
    assert select([], "kernel,packages").names == ("packages", "kernel")
    assert select([], "warning").least is Status.WARNING
    assert set(select([]).names) <= set(BUILT_IN) - {"run"}
    with pytest.raises(ConfigurationError, match="'cudo'"):
        select(["cudo"])
