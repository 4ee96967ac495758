"""A check that hangs, crashes, prints or says nothing is a finding; none leaves a process behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.registry import CheckOptions, CheckResult, Status

OF_OTHERS = """
import os, subprocess, sys, time
from lightning_lockstep.doctor import Finding, Status, check

def well(name):
    return Finding(Status.OK, name, "looked at")

@check(name="hangs", summary="hangs", why="to test")
def hangs(machine, options):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["PIDS"], "w").write(str(child.pid))
    wait_for_ever(machine)

def wait_for_ever(machine):
    machine.run(["sh", "-c", "echo $$ > $PIDS.program; exec sleep 600"], timeout=600)

@check(name="raises", summary="raises", why="to test")
def raises(machine, options):
    yield well("first")
    raise RuntimeError("planted")

@check(name="dies", summary="dies", why="to test")
def dies(machine, options):
    os.kill(os.getpid(), 11)

@check(name="prints", summary="prints", why="to test")
def prints(machine, options):
    print("{} not JSON", flush=True)
    os.system("echo from a program")
    yield well(machine.host)

@check(name="silent", summary="silent", why="to test")
def silent(machine, options):
    return []

@check(name="slow", summary="slow", why="to test", timeout=0.3)
def slow(machine, options):
    yield well("first")
    time.sleep(600)

def note(name, what):
    with open(os.environ["PIDS"] + ".order", "a") as file:
        file.write(f"{name} {what}\\n")

def noted(name):
    note(name, "begins")
    time.sleep(0.1)
    note(name, "ends")
    yield well(name)

@check(name="ranks", summary="ranks", why="to test", needs_ranks=True)
def ranks(machine, options):
    yield from noted("ranks")

@check(name="other", summary="other", why="to test")
def other(machine, options):
    yield from noted("other")

@check(name="talks", summary="talks", why="to test")
def talks(machine, options):
    yield from (well("x" * 1000) for _ in range(1000))
"""
NAMES = ["hangs", "raises", "dies", "prints", "silent", "talks", "slow", "ranks", "other"]


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution of somebody else, with checks as entry points."""
    (tmp_path / "of_others.py").write_text(OF_OTHERS)
    metadata = tmp_path / "of_others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: of-others\nVersion: 1.0\n")
    points = "\n".join(f"{name} = of_others:{name}" for name in [*NAMES, "broken"])
    (metadata / "entry_points.txt").write_text(
        f"[lightning_lockstep.doctor_checks]\n{points.replace('broken = of_others', 'broken = absent')}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    return tmp_path


def results_of(*names: str, timeout: float | None = None) -> dict[str, CheckResult]:
    return {r.check: r for r in Checks(names, CheckOptions(timeout=timeout)).results()}


def test_checks_of_others(others: Path) -> None:
    results = results_of("raises", "dies", "prints", "silent", "talks", "broken")
    assert results["prints"].status is Status.OK
    assert len(results["talks"].findings) == 1000, "more than a pipe holds"
    first, raised = results["raises"].findings
    assert first.subject == "first", "what was found before is kept"
    assert raised.status is Status.PROBLEM and "exit code 1" in raised.evidence
    assert "RuntimeError: planted" in raised.evidence
    (died,) = results["dies"].findings
    assert died.status is Status.PROBLEM and "SIGSEGV" in died.evidence
    assert "The check returned no finding" in results["silent"].findings[0].evidence
    assert "cannot be imported" in results["broken"].findings[0].evidence


def test_a_check_of_others_has_the_limit_that_it_names_and_keeps_what_it_has_found(others: Path) -> None:
    first, late = results_of("slow")["slow"].findings
    assert first.status is Status.OK and first.subject == "first"
    assert late.status is Status.PROBLEM and "did not end within 0.3 s; it was at" in late.evidence


def test_a_check_of_others_that_needs_ranks_runs_alone_after_the_others(others: Path) -> None:
    results = results_of("ranks", "other")
    assert list(results) == ["other", "ranks"] and all(r.status is Status.OK for r in results.values())
    assert (others / "pids.order").read_text().splitlines() == [
        "other begins",
        "other ends",
        "ranks begins",
        "ranks ends",
    ]


def test_a_check_that_hangs_is_ended_with_all_it_started(others: Path) -> None:
    (found,) = results_of("hangs", timeout=2.0)["hangs"].findings
    assert found.status is Status.PROBLEM
    assert "did not end within 2 s" in found.evidence and "wait_for_ever" in found.evidence
    assert found.fix == ("lockstep-doctor hangs --timeout 8",)
    deadline = time.monotonic() + 30
    for file in ("pids", "pids.program"):
        _wait_for_the_end_of(int((others / file).read_text()), deadline)


def _wait_for_the_end_of(pid: int, deadline: float) -> None:
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "what the check had started runs on"
        time.sleep(0.05)
