"""Each check is a function with a reason; findings and options survive JSON; checks are chosen by name."""

from __future__ import annotations

import importlib
import json

import pytest

from lightning_lockstep.doctor.command import select
from lightning_lockstep.doctor.registry import CHECKS, CheckOptions, Finding, Status, worst
from lightning_lockstep.errors import ConfigurationError


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_a_function_and_says_why_it_matters(name: str) -> None:
    module = importlib.import_module(CHECKS[name].module)
    assert callable(module.check) and len(module.WHY.split()) > 20


def test_findings_and_options_survive_json() -> None:
    finding = Finding(Status.PROBLEM, "a", "b", ("c", "d"))
    assert Finding.from_json(json.loads(json.dumps(finding.to_json()))) == finding
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
    assert set(select([]).names) == set(CHECKS) - {"network", "run"}
    with pytest.raises(ConfigurationError, match="'cudo'"):
        select(["cudo"])
