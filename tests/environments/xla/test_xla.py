"""LockstepXLAStrategy: one device; two ranks with a stand-in for what TPUs send each other (``host_runtime.py``)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.strategies import LockstepXLAStrategy, xla
from tests.environments.xla.digits import Classifier, loaders, trainer
from tests.models.package.private_names import is_there, names

ROOT = Path(__file__).parents[3]


def run(module: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a module in a fresh process, where no test has chosen devices."""
    own = ("PJRT", "CPU_NUM", "XLA", "LOCAL_RANK", "PYTHONPATH")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, cwd=cwd, env={**environ, "PYTHONPATH": path}
    )


def test_two_ranks_train_as_one_process_and_reach_each_other(tmp_path: Path) -> None:
    done = run("tests.environments.xla.two_ranks", "train", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0].pop("as alone") < 1e-4, "the weights are those of one CPU process on whole batches"
    assert [one.pop("gradient") for one in found] == [[2.0], [20.0]], "what both ranks made of the part of each"
    assert found[0] == found[1]
    assert found[0] == {
        "device": "xla",
        "broadcast": [
            "torch.int64 cpu [9007199254740993, -1]",
            "torch.float64 cpu 0.3333333333333333",
            "torch.bfloat16 cpu [[3.140625, 3.140625], [3.140625, 3.140625]]",
            "torch.int64 xla [7, 8, 9]",
        ],
        "tensor": 6,
        "reduced": [[3], [1.5], [1], [2]],
        "gathered": [[1], [2]],
        "gathered on the CPU": [[1], [2]],
        "votes": [False, True],
        "logged": [0.5, 0.5],
        "unused has a gradient": False,
        "resumed": [12, 4],
        "same weights": True,
    }
    assert re.search(r"(?m)^ *0  .*  xla:0 ", done.stderr), "the placement table"


def test_a_rank_that_fails_ends_both(tmp_path: Path) -> None:
    done = run("tests.environments.xla.two_ranks", "raises", str(tmp_path))
    assert done.returncode == 1, done.stderr
    words = re.escape("stage train, in on_train_batch_start: ValueError: the third batch of rank 1")
    assert re.search(rf"lightning-lockstep: rank 1 of 2 \(.*\) .*{words}", done.stderr), done.stderr
    # A program that catches this goes on: nothing counts down to an end by force.
    assert (tmp_path / "rank1.txt").read_text() == "over"


def test_by_the_command_line(tmp_path: Path) -> None:
    command = "strategy=xla trainer.accelerator=cpu trainer.devices=1 data=digits trainer.max_epochs=1"
    done = run(
        "lightning_lockstep.train",
        *command.split(),
        "precision=bf16-true",
        "trainer.limit_train_batches=3",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "3 in 1 epoch on 1 rank" in done.stdout
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    weights = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert {(value.device.type, value.dtype) for value in weights.values()} == {("cpu", torch.bfloat16)}


# -- what is refused -----------------------------------------------------------------------------------


def test_several_replicas_on_the_cpu(tmp_path: Path) -> None:
    words = "strategy='lockstep_xla' with 2 devices: expected 1, because torch-xla's devices on the CPU cannot reduce"
    with pytest.raises(ConfigurationError, match=words):
        trainer(tmp_path, LockstepXLAStrategy(), devices=2)


def test_devices_that_were_taken_before_the_ranks_are_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the process of these tests has them; only what is refused sooner on the CPU is left out."""
    monkeypatch.setattr(xla, "check_replicas", lambda count: None)
    made = trainer(tmp_path, LockstepXLAStrategy(), devices=2)
    with pytest.raises(LaunchError, match="XLA was already used in this process"):
        made.fit(Classifier(), *loaders())


def test_settings_that_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="grace_period=-1"):
        LockstepXLAStrategy(grace_period=-1)
    with pytest.raises(ConfigurationError, match="downcast_bf16='yes'"):
        LockstepXLAStrategy(downcast_bf16="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="random_numbers='of_sample': expected 'of_rank', because"):
        LockstepXLAStrategy(random_numbers="of_sample")


def test_torch_xla_has_every_private_name() -> None:
    found = sorted(name for name in names() if name.startswith("torch_xla."))
    assert len(found) > 3 and [name for name in found if not is_there(name)] == []
