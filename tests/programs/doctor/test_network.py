"""The check ``network`` on this host: ranks that it starts, ranks of mpirun, and what it says when one fails."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_lockstep.distributed.process_group import forget_rendezvous
from lightning_lockstep.doctor import network
from lightning_lockstep.doctor.checks.network import Trial, examine
from lightning_lockstep.doctor.network import Ranks, backends_of, ranks_here
from lightning_lockstep.doctor.registry import Finding, Status
from tests.harness import run_script
from tests.models.distributed.mpi.launch import mpi_command, mpi_environ

HOST = socket.gethostname()


@contextmanager
def two_ranks() -> Iterator[Ranks]:
    ranks = ranks_here(2)
    try:
        yield ranks
    finally:
        ranks.end(0)
        forget_rendezvous()


def found_of(*backends: str) -> dict[str, Finding]:
    with two_ranks() as ranks:
        return {finding.subject: finding for finding in examine(ranks, backends)}


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let the ranks' processes, but not this one, find another torch."""
    real = (
        "import os, signal, sys\n"
        "rank = sys.argv[2]\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['torch']\n"
        "import torch, torch.distributed\n"
    )
    (folder / "torch.py").write_text(real + program)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_ranks_here_pass_every_stage() -> None:
    found = found_of("gloo", "nccl", "mpi4py")
    assert not [finding for finding in found.values() if finding.status is Status.PROBLEM], found
    assert found["ranks"].evidence == f"all 2 reported ({HOST}: ranks 0-1)"
    assert found["gloo"].status is Status.OK and "all-reduce correct" in found["gloo"].evidence
    assert "mpi4py" not in found, "these are no ranks of MPI"


FAULTS = {
    "dies": (
        "if rank == '1':\n    os.kill(os.getpid(), signal.SIGKILL)\n",
        "gloo: start",
        f"failed on rank 1: rank 1 on {HOST}: its process ended: killed by SIGKILL. rank 0 completed it",
    ),
    "freezes": (
        "if rank == '1':\n    torch.distributed.barrier = lambda: os.kill(os.getpid(), signal.SIGSTOP)\n",
        "gloo: barrier",
        f"failed on rank 1: rank 1 on {HOST}: no answer within 6 s. rank 0 failed or timed out after that",
    ),
    "computes wrong": (
        "torch.distributed.all_reduce = lambda value: value.add_(rank == '1')\n",
        "gloo: all-reduce",
        "ArithmeticError: the sum is",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_step_and_the_rank_to_blame_are_named(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, subject, told = FAULTS[fault]
    plant(tmp_path, monkeypatch, program)
    for step in ("rendezvous", "barrier"):
        monkeypatch.setitem(network.STEPS, step, 6.0)
    monkeypatch.setattr("lightning_lockstep.doctor.checks.network._CURES", {})
    found = found_of("gloo")
    assert found[subject].status is Status.PROBLEM and told in found[subject].evidence, found


def test_an_interface_that_is_not_there_is_named_and_the_one_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    found = found_of("gloo")
    cured = found["gloo: rendezvous"]
    assert cured.status is Status.PROBLEM and cured.fix == ("export GLOO_SOCKET_IFNAME=lo",)
    assert "Unable to find address for: absent0. It works with GLOO_SOCKET_IFNAME=lo; it was set to absent0" in (
        cured.evidence
    )


def test_what_nccl_writes_of_a_fault_stands_in_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text(
        "import os\n"
        "with open(os.environ['NCCL_DEBUG_FILE'], 'w') as log:\n"
        "    log.write('vm:1:1 [0] NCCL INFO NET/Socket\\nvm:1:1 [0] NCCL WARN Duplicate GPU detected\\n')\n"
        "raise RuntimeError('no communicator')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with two_ranks() as ranks:
        ranks.meet()
        for facts in ranks.facts.values():
            facts["devices"] = 2
        monkeypatch.setattr(ranks, "meet", lambda: None)
        [*_, nccl] = examine(ranks, ["nccl"])
    assert "RuntimeError: no communicator" in nccl.evidence
    assert nccl.evidence.endswith("NCCL's own log: vm:1:1 [0] NCCL WARN Duplicate GPU detected")


def test_errors_that_explain_others_are_blamed_first() -> None:
    late = {"ok": False, "late": True, "error": "no answer within 20 s"}
    waited = {"ok": False, "error": "RuntimeError: Timed out waiting 17000ms for recv"}
    raised = {"ok": False, "error": "ValueError: x"}
    well, hosts = {"start": {"ok": True}}, {"a": [0, 1], "b": [2, 3]}

    def blamed(*answers: dict[str, object]) -> set[int]:
        steps = {rank: {**well, "barrier": answer} for rank, answer in enumerate(answers)}
        return set(Trial("gloo", hosts, steps).blamed)

    assert blamed(waited, late, waited, waited) == {1}, "a frozen rank, not those that waited for it"
    assert blamed(waited, late, raised, waited) == {2}
    assert blamed(waited, waited, waited, waited) == {0, 1, 2, 3}
    silent = Trial("gloo", hosts, {0: well, 1: {}, 2: well, 3: well})
    assert silent.step == "start" and list(silent.blamed) == [1]


@pytest.mark.parametrize(
    ("strategy", "on_gpus", "on_cpu"),
    [
        ("ddp", ("gloo", "nccl"), ("gloo",)),
        ("fsdp_offload", ("gloo", "nccl"), ("gloo",)),
        ("deepspeed_stage_3", ("gloo", "nccl"), ("gloo",)),
        ("mpi", ("nccl",), ()),
        ("xla", ("gloo",), ("gloo",)),
        ("xla_spmd", (), ()),
        ("single", (), ()),
    ],
)
def test_the_backends_of_a_strategy(strategy: str, on_gpus: tuple[str, ...], on_cpu: tuple[str, ...]) -> None:
    assert (backends_of(strategy, "auto"), backends_of(strategy, "cpu")) == (on_gpus, on_cpu)


@pytest.mark.mpi
def test_ranks_of_mpirun_make_one_table() -> None:
    program = ["-m", "lightning_lockstep.doctor", "network", "packages", "--json"]
    outcome = run_script([*mpi_command("open_mpi", 2), *program], env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0 and outcome.leftovers == (), outcome.output
    told = json.loads(outcome.stdout)  # one object, of rank 0
    assert [check["check"] for check in told["checks"]] == ["packages", "network"]
    rows = {row["subject"]: row for row in told["checks"][1]["findings"]}
    assert "ranks 0-1" in rows["ranks"]["evidence"]
    assert rows["gloo"]["status"] == rows["mpi4py"]["status"] == "ok", rows
