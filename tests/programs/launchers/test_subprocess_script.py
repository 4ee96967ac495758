"""Which Trainer the ranks of a program work for."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lightning_lockstep._settings import LAUNCHER_PID
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers import subprocess_script
from lightning_lockstep.launchers.environments import LockstepEnvironment
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher
from tests.helpers import run_script


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


WITHOUT_A_FILE = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_lockstep
from lightning_lockstep.errors import LaunchError


def fit(strategy, model):
    options = {"logger": False, "enable_checkpointing": False, "fast_dev_run": 1}
    L.Trainer(accelerator="cpu", devices=2, strategy=strategy, **options).fit(model)


class Net(BoringModel):
    pass


for strategy in ("lockstep_ddp", "lockstep_ddp_spawn", "lockstep_ddp_fork"):
    model = Net()
    if strategy == "lockstep_ddp_spawn":
        model.losses = {"a": [lambda value: value]}
    try:
        fit(strategy, model)
        print(strategy, "has fitted")
    except LaunchError as error:
        print(strategy, error)
"""


def test_what_a_rank_cannot_be_started_from_is_said_before_any_is() -> None:
    outcome = run_script([sys.executable, "-c", WITHOUT_A_FILE], timeout=200)
    assert outcome.returncode == 0, outcome.output
    assert outcome.leftovers == ()
    popen, spawn, fork = (line for line in outcome.stdout.splitlines() if line.startswith("lockstep_"))
    assert "The program is python -c, which is no file in" in popen
    assert "or fork the ranks from this process: strategy='lockstep_ddp_fork'" in popen
    assert "Net.losses['a'][0] cannot be pickled" in spawn
    assert fork == "lockstep_ddp_fork has fitted"
    assert "ended before all ranks had met" not in outcome.stderr


@pytest.mark.parametrize(
    ("program", "called"), [("-", "standard input"), ("", "standard input"), ("gone.py", "'gone.py'")]
)
def test_a_program_that_is_no_file_cannot_be_run_again(
    program: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(LaunchError, match=f"The program is {called}, which is no file"):
        subprocess_script.rank_command()
