"""Which Trainer the ranks of a program work for."""

from __future__ import annotations

import os
import signal
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


def test_a_rank_watches_its_parent_and_tells_its_failures_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a Trainer does, with one thread; the last supervisor is told."""
    monkeypatch.setenv(LAUNCHER_PID, str(os.getppid()))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(subprocess_script, "_works_for", None)
    told = list[int]()

    def watches() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "lockstep-parent"]

    for number in range(2):
        supervisor = RankSupervisor(SupervisorSettings())
        launcher = ScriptLauncher(supervisor, LockstepEnvironment(), num_processes=2, num_nodes=1)
        assert len(launcher.launch(watches)) == 1
        supervisor.propagation = cast(
            Any, SimpleNamespace(report_lost_parent=lambda n=number: told.append(n))
        )
    (thread,) = watches()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    thread.join(10)
    assert (told, watches()) == ([1], [])


WITHOUT_A_FILE = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_lockstep


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
    except Exception as error:
        print(strategy, error)
"""


def test_what_a_rank_cannot_be_started_from_is_said_before_any_is() -> None:
    outcome = run_script([sys.executable, "-c", WITHOUT_A_FILE], timeout=200)
    assert outcome.returncode == 0, outcome.output
    assert outcome.leftovers == ()
    popen, spawn, fork = (line for line in outcome.stdout.splitlines() if line.startswith("lockstep_"))
    assert "The program is python -c, which is not a file in" in popen
    assert "or fork the ranks from this process: strategy='lockstep_ddp_fork'" in popen
    assert "Can't pickle <function" in spawn
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
    with pytest.raises(LaunchError, match=f"The program is {called}, which is not a file"):
        subprocess_script.rank_command()


WAITS = """
import datetime, os, signal, threading
import torch
from lightning_lockstep._lightning import find_free_network_port
from lightning_lockstep.distributed.process_group import start_process_group

threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
place = {"address": "127.0.0.1", "port": find_free_network_port(), "timeout": datetime.timedelta(seconds=200)}
start_process_group("gloo", rank=0, world_size=2, device=torch.device("cpu"), **place)
"""


def test_ctrl_c_ends_a_rank_that_waits_for_one_that_never_comes() -> None:
    outcome = run_script([sys.executable, "-c", WAITS], timeout=100)
    assert outcome.returncode == -signal.SIGINT, outcome.output
