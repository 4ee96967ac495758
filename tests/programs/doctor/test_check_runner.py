"""A check that hangs, crashes, prints or says nothing is a finding; none leaves a process behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_lockstep.doctor import check_runner
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.registry import CHECKS, Check, CheckOptions, CheckResult, Status

WELL = """
import os, subprocess, sys, time
from lightning_lockstep.doctor.registry import ok

def well(name):
    return ok(name, "looked at")
"""
# A module for each check: its function is `check`.
PLANTED = {
    "hangs": """
def check(machine, options):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["PIDS"], "w").write(str(child.pid))
    wait_for_ever(machine)

def wait_for_ever(machine):
    machine.run(["sh", "-c", "echo $$ > $PIDS.program; exec sleep 600"], timeout=600)
""",
    "raises": """
def check(machine, options):
    yield well("first")
    raise RuntimeError("planted")
""",
    "dies": """
def check(machine, options):
    os.kill(os.getpid(), 11)
""",
    "prints": """
def check(machine, options):
    print("{} not JSON", flush=True)
    os.system("echo from a program")
    yield well(machine.host)
""",
    "talks": """
def check(machine, options):
    yield from (well("x" * 1000) for _ in range(1000))
""",
    "slow": """
def check(machine, options):
    yield well("first")
    time.sleep(600)
""",
    "noted": """
def note(what):
    with open(os.environ["PIDS"] + ".order", "a") as file:
        file.write(what + "\\n")

def check(machine, options):
    note("begins")
    time.sleep(0.1)
    note("ends")
    yield well("noted")
""",
}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checks that go wrong."""
    for name, text in PLANTED.items():
        (tmp_path / f"planted_{name}.py").write_text(WELL + text)
        timeout = 1.0 if name == "slow" else 30.0
        monkeypatch.setitem(CHECKS, name, Check("to test", f"planted_{name}", timeout))
    monkeypatch.setitem(CHECKS, "alone", Check("to test", "planted_noted", runs_alone=True))
    monkeypatch.setitem(CHECKS, "broken", Check("to test", "planted_absent"))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path


def results_of(*names: str, timeout: float | None = None) -> dict[str, CheckResult]:
    return {r.check: r for r in Checks(names, CheckOptions(timeout=timeout)).results()}


def test_what_a_check_says_and_how_it_ends(planted: Path) -> None:
    results = results_of("raises", "dies", "prints", "talks", "broken")
    assert results["prints"].status is Status.OK
    assert len(results["talks"].findings) == 1000, "more than a pipe holds"
    first, raised = results["raises"].findings
    assert first.subject == "first", "what was found before is kept"
    assert raised.status is Status.PROBLEM and "exit code 1" in raised.evidence
    assert "RuntimeError: planted" in raised.evidence
    (died,) = results["dies"].findings
    assert died.status is Status.PROBLEM and "SIGSEGV" in died.evidence
    assert "No module named 'planted_absent'" in results["broken"].findings[0].evidence


def test_a_check_has_its_limit_and_keeps_what_it_has_found(planted: Path) -> None:
    first, late = results_of("slow")["slow"].findings
    assert first.status is Status.OK and first.subject == "first"
    assert late.status is Status.PROBLEM and "did not end within 1 s; it was at" in late.evidence


def test_a_check_that_runs_alone_does_so_after_the_others(planted: Path) -> None:
    results = results_of("alone", "noted")
    assert list(results) == ["noted", "alone"] and all(r.status is Status.OK for r in results.values())
    assert (planted / "pids.order").read_text().split() == ["begins", "ends"] * 2


def test_at_most_as_many_run_at_a_time_as_this_process_may_use_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_runner, "usable_cores", lambda: (0, 1, 2))
    checks = Checks(["kernel", "packages", "slurm", "mpi", "cuda"], CheckOptions())
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, len(checks.running()))

    assert len(list(checks.results(count))) == 5 and most == 3


def test_a_check_that_hangs_is_ended_with_all_it_started(planted: Path) -> None:
    (found,) = results_of("hangs", timeout=2.0)["hangs"].findings
    assert found.status is Status.PROBLEM
    assert "did not end within 2 s" in found.evidence and "wait_for_ever" in found.evidence
    assert found.fix == ("lockstep-doctor hangs --timeout 8",)
    deadline = time.monotonic() + 30
    for file in ("pids", "pids.program"):
        _wait_for_the_end_of(int((planted / file).read_text()), deadline)


def _wait_for_the_end_of(pid: int, deadline: float) -> None:
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "what the check had started runs on"
        time.sleep(0.05)
