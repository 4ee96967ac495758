"""`debug=preflight`: the checks for the chosen strategy, before any rank starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_lockstep._application.checks import checks_for
from tests.common.distributed.mpi.launch import mpi_environ, why_no
from tests.helpers import run_script

TRAIN = [sys.executable, "-m", "lightning_lockstep.train", "debug=preflight", "trainer.accelerator=cpu"]


@pytest.mark.parametrize(
    ("strategy", "devices", "accelerator", "expected"),
    [
        ("ddp", 2, "cpu", ("packages", "kernel", "network")),
        ("ddp", 1, "cpu", ("packages", "kernel")),
        ("mpi", 2, "cpu", ("packages", "kernel", "mpi", "network")),
        ("deepspeed_stage_2", 1, "gpu", ("packages", "kernel", "cuda", "devices", "deepspeed")),
        ("xla_spmd", 1, "tpu", ("packages", "kernel", "xla")),
        ("ddp", "auto", "cpu", ("packages", "kernel")),
        ("ddp", "auto", "gpu", ("packages", "kernel", "cuda", "devices", "network")),
        ("ddp", -1, "auto", ("packages", "kernel", "cuda", "devices", "network")),
        ("ddp", [0, 2], "gpu", ("packages", "kernel", "cuda", "devices", "network")),
        ("ddp", "0,2", "gpu", ("packages", "kernel", "cuda", "devices", "network")),
        ("ddp", [1], "gpu", ("packages", "kernel", "cuda", "devices")),
    ],
)
def test_the_checks_follow_the_strategy_and_the_devices(
    strategy: str,
    devices: Any,
    accelerator: str,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = OmegaConf.create(
        {
            "strategy": {"hostfile": None},
            "trainer": {"devices": devices, "accelerator": accelerator},
            "hydra": {"runtime": {"choices": {"strategy": strategy}}},
        }
    )
    assert checks_for(config)[0] == expected


@pytest.mark.mpi
@pytest.mark.skipif(why_no("open_mpi") is not None, reason=str(why_no("open_mpi")))
def test_a_problem_stops_the_run_with_the_table(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("no-such-host.invalid slots=1\n")
    command = [*TRAIN, "strategy=mpi", f"strategy.hostfile={tmp_path / 'hosts'}", "trainer.devices=1"]
    outcome = run_script([*command, f"hydra.run.dir={tmp_path / 'run'}"], env=mpi_environ(), timeout=120)
    assert outcome.returncode == 2 and not outcome.timed_out, outcome.output
    assert "no-such-host.invalid: its name does not resolve" in " ".join(outcome.stderr.split()), (
        outcome.stderr
    )
    assert "debug=preflight: the checks above found problems (mpi)" in outcome.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.mpi
def test_a_machine_without_a_problem_trains(tmp_path: Path) -> None:
    small = [
        "data=source_text",
        "model=byte_gpt",
        "data.max_bytes=60000",
        "trainer.max_steps=2",
        "test=false",
    ]
    command = [*TRAIN, *small, "trainer.devices=1", f"hydra.run.dir={tmp_path / 'run'}"]
    outcome = run_script(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert "packages" in outcome.stderr and (tmp_path / "run" / "summary.json").exists()
