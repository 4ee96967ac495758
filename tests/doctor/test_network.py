"""The check ``network`` on this host: ranks that it starts, ranks of mpirun, and what it says when one fails."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from lightning_lockstep.doctor.findings import Status
from lightning_lockstep.doctor.network.backends import try_backend
from lightning_lockstep.doctor.network.examination import examine
from lightning_lockstep.doctor.network.identity import joined_rank
from lightning_lockstep.doctor.network.links import ClosedError, Link, accept_ranks, connect, listen_at
from lightning_lockstep.doctor.network.meeting import agents_here
from lightning_lockstep.doctor.network.report import backend_finding, ranks_in_words
from tests.distributed.mpi.launch import mpi_command, mpi_environ, why_no
from tests.helpers import run_script

pytestmark = pytest.mark.slow

DOCTOR = [sys.executable, "-m", "lightning_lockstep.doctor"]


def test_ranks_are_written_as_people_write_them() -> None:
    assert ranks_in_words([3]) == "rank 3"
    assert ranks_in_words([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_who_does_not_know_the_word_of_the_job_is_no_rank() -> None:
    with listen_at("127.0.0.1", [0]) as server:
        place = [("127.0.0.1", server.getsockname()[1])]
        with socket.create_connection(place[0]) as stranger:
            stranger.sendall(b'{"word": "wrong", "rank": 1}\n')
            assert accept_ranks(server, "right", {1}, 0.5) == {}
    link, why = connect(place, "right", 1, 0.5)
    assert link is None and "refused" in why


def test_a_link_says_that_its_other_end_is_gone() -> None:
    ours, theirs = socket.socketpair()
    link = Link.of_socket(ours)
    theirs.sendall(b'not json\n{"number": 1}\n')
    assert link.receive(5) == {"number": 1}
    assert link.receive(0.05) is None
    theirs.close()
    for _ in range(2):  # whoever asks again hears the same
        with pytest.raises(ClosedError):
            link.receive(5)
    link.close()


def test_who_started_this_rank_is_read_from_the_environment() -> None:
    torchrun = {
        "TORCHELASTIC_RUN_ID": "none",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
    }
    found = joined_rank(torchrun)
    assert found is not None and (found.started_by, found.rank, found.size) == ("torchrun", 1, 2)
    srun = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "node[05-06]",
    }
    found = joined_rank(srun)
    assert found is not None and (found.started_by, found.rank, found.address) == ("srun", 1, "node05")
    assert joined_rank({"RANK": "0"}) is None


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("raise ImportError('no torch here')", "ImportError: no torch here"),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by SIGKILL"),
    ],
)
def test_the_rank_that_fails_is_named(what: str, told: str, tmp_path: Path) -> None:
    """Rank 1 finds another torch than rank 0."""
    (tmp_path / "torch.py").write_text(what)
    group = agents_here(2)
    try:
        found = try_backend(
            group, "gloo", "127.0.0.1", environ=lambda rank: {"PYTHONPATH": str(tmp_path)} if rank else {}
        )
        finding = backend_finding(group, found)
    finally:
        group.close()
    assert found.step == "start" and [fault.rank for fault in found.faults] == [1]
    assert finding.status is Status.PROBLEM and finding.subject == "gloo: start"
    assert told in finding.evidence and f"rank 1 on {socket.gethostname()}" in finding.evidence
    assert "rank 0 had no fault" in finding.evidence


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
    group = agents_here(2)
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
    assert {fault.rank: fault.kind for fault in found.faults} == {0: "error", 1: "late"}, found
    assert finding.subject == "gloo: barrier" and "rank 1" in finding.evidence


def test_ranks_here_pass_every_stage() -> None:
    group = agents_here(2)
    try:
        found = list(examine(group, mpi=False))
    finally:
        group.close()
    assert not [finding for finding in found if finding.status is Status.PROBLEM], found
    gloo = next(finding for finding in found if finding.subject == "gloo")
    assert gloo.status is Status.OK and "all-reduce right" in gloo.evidence


@pytest.mark.skipif(why_no("open_mpi") is not None, reason=str(why_no("open_mpi")))
def test_ranks_of_mpirun_make_one_table() -> None:
    command = [
        *mpi_command("open_mpi", 2),
        "-m",
        "lightning_lockstep.doctor",
        "network",
        "packages",
        "--json",
    ]
    outcome = run_script(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0 and outcome.leftovers == (), outcome.output
    told = json.loads(outcome.stdout)  # one object, of rank 0
    assert [check["check"] for check in told["checks"]] == ["packages", "network"]
    rows = {row["subject"]: row for row in told["checks"][1]["findings"]}
    assert "ranks 0-1" in rows["ranks"]["evidence"]
    assert rows["gloo"]["status"] == rows["mpi4py"]["status"] == "ok", rows
