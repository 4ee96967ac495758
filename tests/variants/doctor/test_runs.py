"""Run folders and ranks of the doctor in more ways: a healthy run, one out of memory, a frozen rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_lockstep.doctor.network_examination import backend_finding, kind_of, try_backend
from lightning_lockstep.doctor.network_ranks import ranks_here
from lightning_lockstep.doctor.registry import Status
from tests.common.application.command_lines import TRAIN
from tests.helpers import run_script
from tests.programs.doctor.test_run import SMALL, TWO, findings


@pytest.mark.parametrize(
    ("arguments", "status", "subject", "told", "fix"),
    [
        ("trainer.devices=1", Status.OK, "run", "it finished: 4 steps on 1 rank;", ""),
        (
            f"{TWO} model._target_=tests.common.doctor.faulty_models.AsksForTooMuch",
            Status.PROBLEM,
            "out of memory",
            "rank 1 of 2",
            "lockstep-train callbacks=auto_batch_size ...",
        ),
    ],
    ids=["healthy", "out_of_memory"],
)
def test_real_runs(arguments: str, status: Status, subject: str, told: str, fix: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    outcome = run_script([*TRAIN, *SMALL.split(), *arguments.split(), f"hydra.run.dir={folder}"], timeout=120)
    assert not outcome.timed_out and (outcome.returncode == 0) == (status is Status.OK), outcome.output
    found = findings(folder)
    assert (found[0].status, found[0].subject) == (status, subject), found
    assert told in found[0].evidence and fix in "\n".join(found[0].fix), found
    assert all(finding.status is not Status.PROBLEM for finding in found[1:]), found


def test_a_rank_that_is_late_is_named_and_the_others_do_not_wait_for_ever(tmp_path: Path) -> None:
    """Rank 1 stops itself, as a frozen process does, when it is to wait for the others."""
    program = (
        "import os, signal, sys\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['torch']\n"
        "import torch\n"
        "import torch.distributed\n"
        "torch.distributed.barrier = lambda: os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    (tmp_path / "torch.py").write_text(program)
    group = ranks_here(2)
    try:
        found = try_backend(
            group,
            "gloo",
            "127.0.0.1",
            environ=lambda rank: {"PYTHONPATH": str(tmp_path)} if rank else {},
            patience=0.5,
        )
        finding = backend_finding(group, found)
    finally:
        group.close()
    assert found.step == "barrier", found
    assert {rank: kind_of(fault) for rank, fault in found.faults.items()} == {0: "error", 1: "late"}, found
    assert finding.subject == "gloo: barrier" and "rank 1" in finding.evidence
