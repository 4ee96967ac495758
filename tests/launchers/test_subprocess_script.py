"""Which Trainer the ranks of a program work for."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_lockstep._settings import LAUNCHER_PID
from lightning_lockstep.launchers import subprocess_script
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher


class Child:
    """A process that runs until it is killed."""

    pid = 4711

    def __init__(self, *_: Any) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9

    def wait(self, timeout: float | None = None) -> int | None:
        return self.returncode


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[ScriptLauncher]:
    """Those of two Trainers in one program; the ranks that they start are imitated."""
    monkeypatch.setattr(subprocess_script, "_started", None)
    monkeypatch.setattr(subprocess_script, "watch_interrupts", lambda *_, **__: lambda: None)
    no_thread = SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(subprocess_script, "threading", no_thread)
    monkeypatch.setattr(ScriptLauncher, "_rank_environment", lambda self: {})
    monkeypatch.setattr(ScriptLauncher, "_start_rank", Child)
    made = []
    for _ in range(2):
        launcher = ScriptLauncher(
            RankSupervisor(SupervisorSettings()), LockstepEnvironment(), num_processes=2, num_nodes=1
        )
        launcher._start_ranks()
        made.append(launcher)
    return made


def test_a_later_trainer_ends_the_children_before_a_forced_end(launchers: list[ScriptLauncher]) -> None:
    first, second = launchers
    assert second.procs is first.procs, "the ranks are used again"
    assert second._supervisor.on_force is not None
    second._supervisor.on_force()
    assert [child.returncode for child in second.procs] == [-9]


def test_a_child_that_ends_is_reported_to_the_trainer_that_it_works_for(
    launchers: list[ScriptLauncher],
) -> None:
    first, second = launchers
    reported: list[tuple[str, int, int, int]] = []
    for name, launcher in (("first", first), ("second", second)):
        launcher._supervisor.propagation = SimpleNamespace(  # type: ignore[assignment]
            failed=False, report_child_exit=lambda *of, name=name: reported.append((name, *of))
        )
    (child,) = second.procs
    child.kill()
    first._watch(subprocess_script._started)  # type: ignore[arg-type]
    assert reported == [("second", 1, -9, 4711)]


def test_a_rank_watches_its_parent_until_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a Trainer starts a thread for that, which is not to stay."""
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    monkeypatch.setenv("LOCAL_RANK", "1")
    supervisor = RankSupervisor(SupervisorSettings())
    launcher = ScriptLauncher(supervisor, LockstepEnvironment(), num_processes=2, num_nodes=1)

    def watches() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "lockstep-parent"]

    assert len(launcher.launch(watches)) == 1
    supervisor.propagation = cast(Any, object())
    for thread in watches():
        thread.join(10)
    assert watches() == []
