"""A program whose ranks cannot be started, and one that waits for a rank that never comes."""

from __future__ import annotations

import signal
import sys

from tests.harness import run_script

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
