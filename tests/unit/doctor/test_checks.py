"""A check that hangs or raises is a finding; some run at a time, and some alone."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from lightning_lockstep.doctor import command
from lightning_lockstep.doctor.registry import CHECKS, Check, CheckOptions, CheckResult, Finding, Status, ok
from lightning_lockstep.errors import ConfigurationError

Plant = Callable[..., None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Make a function a check."""

    def made(name: str, check: Callable[..., Iterator[Finding]], **how: object) -> None:
        monkeypatch.setitem(CHECKS, name, Check("to test", **how))  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, f"lightning_lockstep.doctor.checks.{name}", SimpleNamespace(check=check))

    return made


def results_of(*names: str, timeout: float | None = None) -> dict[str, CheckResult]:
    options = CheckOptions(timeout=timeout)
    return {result.check: result for result in command.results_of(names, options)}


def test_an_error_is_a_finding_and_what_was_found_before_is_kept(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object) -> Iterator[Finding]:
        yield ok("first", "looked at")
        raise RuntimeError("planted")

    def refuses(*_: object) -> Iterator[Finding]:
        raise ConfigurationError("hostfile absent: it cannot be read")

    plant("raises", raises)
    plant("refuses", refuses)
    monkeypatch.setitem(CHECKS, "broken", Check("to test"))
    results = results_of("raises", "refuses", "broken")
    first, raised = results["raises"].findings
    assert first.subject == "first" and raised.status is Status.PROBLEM
    assert "RuntimeError: planted" in raised.evidence and "in raises" in raised.evidence
    assert results["refuses"].findings[0].evidence == "hostfile absent: it cannot be read"
    assert "No module named" in results["broken"].findings[0].evidence


def test_a_check_has_its_limit_and_keeps_what_it_has_found(plant: Plant) -> None:
    over = threading.Event()

    def hangs(*_: object) -> Iterator[Finding]:
        yield ok("first", "looked at")
        over.wait()

    plant("hangs", hangs, timeout=30.0)
    began = time.monotonic()
    first, late = results_of("hangs", timeout=0.5)["hangs"].findings
    over.set()
    assert time.monotonic() - began < 20 and first.status is Status.OK
    assert late.status is Status.PROBLEM and "did not end within 0.5 s" in late.evidence
    assert late.fix == ("lockstep-doctor hangs --timeout 2",)


def test_as_many_run_at_a_time_as_there_are_cores_and_some_alone(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "usable_cores", lambda: (0, 1, 2))
    running: list[object] = []
    most: dict[str, int] = {}

    def named(name: str) -> Callable[..., Iterator[Finding]]:
        def check(*_: object) -> Iterator[Finding]:
            running.append(name)
            time.sleep(0.1)
            most[name] = len(running)
            running.remove(name)
            yield ok(name, "looked at")

        return check

    names = ["alone", "a", "b", "c", "d", "e"]
    for name in names:
        plant(name, named(name), runs_alone=name == "alone")
    results = results_of(*names)
    assert list(results)[-1] == "alone" and most["alone"] == 1
    assert max(most.values()) == 3
