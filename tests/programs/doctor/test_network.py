"""The check ``network`` on this host: ranks that it starts, ranks of mpirun, and what it says when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

import lightning_lockstep
from lightning_lockstep.doctor import network_ranks, network_rendezvous
from lightning_lockstep.doctor.network_examination import (
    BackendResult,
    backend_finding,
    devices_of_hosts,
    examine,
    try_backend,
)
from lightning_lockstep.doctor.network_ranks import (
    ClosedError,
    Link,
    OtherProcess,
    RankGroup,
    ranks_by_ssh,
    ranks_here,
)
from lightning_lockstep.doctor.network_rendezvous import accept_ranks, connect, joined_rank, listen_at
from lightning_lockstep.doctor.network_stages import host_facts
from lightning_lockstep.doctor.registry import CheckOptions, Status
from lightning_lockstep.launchers.mpi_hosts import ask_host
from tests.common.distributed.mpi.launch import mpi_command, mpi_environ
from tests.helpers import run_script

Answer = TypeVar("Answer")


def test_who_does_not_know_the_token_of_the_job_is_no_rank() -> None:
    with listen_at("127.0.0.1", [0]) as server:
        place = [("127.0.0.1", server.getsockname()[1])]
        with socket.create_connection(place[0]) as stranger:
            stranger.sendall(b'{"rank": 1, "nonce": "' + b"0" * 64 + b'"}\n{"proof": "wrong"}\n')
            assert accept_ranks(server, "right", {1}, 0.5) == {}
    link, why = connect(place, "right", 1, 0.5)
    assert link is None and "refused" in why


def in_thread(call: Callable[[], Answer]) -> Callable[[], Answer]:
    """Start a call in a thread, and return what waits for its answer."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()

    def answer() -> Answer:
        thread.join()
        return answers[0]

    return answer


def test_who_listens_in_the_place_of_rank_0_and_sends_back_what_it_gets_is_not_rank_0() -> None:
    """It learns nothing that tells it the token of the job, either."""
    heard: list[bytes] = []

    def echo(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, connection.makefile("rwb", buffering=0) as lines:
            for _ in range(2):
                heard.append(lines.readline())
                lines.write(heard[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = in_thread(lambda: echo(server))
        link, why = connect([("127.0.0.1", server.getsockname()[1])], "token", 1, 0.5)
        ended()
    assert link is None and "did not prove that it is rank 0" in why
    assert b"token" not in b"".join(heard) and json.loads(heard[0]).keys() == {"rank", "nonce"}


def test_what_a_stranger_sends_does_not_end_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_rendezvous, "_HANDSHAKE", 1)

    def stranger(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection, contextlib.suppress(OSError):
            connection.sendall(b"[" * 900 + b"\n")
            while connection.recv(1024):
                pass

    with listen_at("127.0.0.1", [0]) as server:
        port = server.getsockname()[1]
        ranks = in_thread(lambda: accept_ranks(server, "token", {1}, 30))
        stranger(port)
        link, why = connect([("127.0.0.1", port)], "token", 1, 30)
        assert link is not None, why
        ranks()[1].close()
        link.close()


def two_processes(end_of_rank_1: Callable[[socket.socket], None]) -> tuple[RankGroup, Callable[[], None]]:
    """Return a group whose rank 1 is a thread that is given the other end of the connection; and what ends it."""
    ours, theirs = socket.socketpair()
    ended = in_thread(lambda: end_of_rank_1(theirs))
    group = RankGroup(2, [0], [OtherProcess(Link.of_socket(ours), [1])])
    return group, ended


def rank_1(connection: socket.socket, version: str = lightning_lockstep.__version__) -> Link:
    """Let rank 1 report; return its link."""
    link = Link.of_socket(connection)
    link.send(stage="facts", answers={1: {**host_facts(), "version": version}})
    link.receive()
    return link


def test_a_rank_with_another_version_of_the_package_takes_no_part() -> None:
    group, ended = two_processes(lambda connection: rank_1(connection, "0.0.1").close())
    group.meet()
    ended()
    finding, *others = examine(group, mpi=False)
    group.close()
    assert others == [] and finding.status is Status.PROBLEM
    assert "rank 1 of 2 did not report: lightning-lockstep is 0.0.1 on" in finding.evidence
    assert finding.fix[0].startswith(f"pip install lightning-lockstep=={lightning_lockstep.__version__}")


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (lambda link: link.close(), "its process ended"),
        (lambda link: link.send(stage="another", answers={}), "it takes the stage 'another' when others"),
        (lambda link: link.receive(), "it did not answer within 0 s"),  # until the group is closed
    ],
)
def test_a_rank_that_dies_or_is_late_is_one_answer_and_takes_no_further_part(
    what: Callable[[Link], object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(connection: socket.socket) -> None:
        link = rank_1(connection)
        with contextlib.suppress(ClosedError):
            what(link)
        link.close()

    monkeypatch.setattr(network_ranks, "_MARGIN", 0.4)
    group, ended = two_processes(rank)
    group.meet()
    for _ in range(2):
        answers = group.all("stage", 0.1, lambda rank: {"ok": True})
        assert answers[0] == {"ok": True}
        assert answers[1]["silent"] and told in answers[1]["error"], answers
    group.close()
    ended()


def started(devices: list[list[str]]) -> BackendResult:
    answers = {rank: {"devices": len(seen), "uuids": seen} for rank, seen in enumerate(devices)}
    return BackendResult("gloo", answers={"start": answers})


def test_each_rank_that_sees_one_device_has_its_own_under_srun() -> None:
    """srun --gpus-per-task=1: what all of them call number 0 are different devices."""
    bound = started([["a"], ["b"], ["c"]])
    assert devices_of_hosts({"x": [0, 1], "y": [2]}, bound) == {"x": 2, "y": 1}
    assert devices_of_hosts({"x": [0, 1]}, started([["a"], ["a"]])) == {"x": 1}
    assert devices_of_hosts({"x": [0, 1]}, started([["a", "b"], ["a", "b"]])) == {"x": 2}
    unknown = BackendResult("gloo", answers={"start": {0: {"devices": 4}, 1: {"devices": 4}}})
    assert devices_of_hosts({"x": [0, 1]}, unknown) == {"x": 4}
    assert devices_of_hosts({"x": [0]}, started([[]])) == {"x": 0}


def test_two_machines_of_one_name_are_two_hosts() -> None:
    group = RankGroup(3)
    for rank, machine in enumerate(["first", "second", "first"]):
        group.facts[rank] = {
            "host": "localhost",
            "name": "localhost",
            "machine": machine,
            "outside": [f"10.0.0.{'1' if machine == 'first' else '2'}"],
        }
    group.give_hosts_unique_names()
    assert group.hosts == {"localhost (10.0.0.1)": [0, 2], "localhost (10.0.0.2)": [1]}


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh that runs the line here, in a shell whose settings print a greeting; returns what it was called for."""
    calls = tmp_path / "calls"
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/bash\nfor last; do :; done\necho "$@" >> {calls}\n'
        'echo "Welcome to {node} 1!"\nexec bash -c "$last"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return calls


def test_one_ssh_connects_all_ranks_of_a_host(ssh: Path) -> None:
    group = ranks_by_ssh(["192.0.2.7"], 3, [], CheckOptions())  # an address that is nobody's
    try:
        assert group.ranks == [0, 1, 2] and not group.missing
        assert len(ssh.read_text().splitlines()) == 1
    finally:
        group.close()


def test_a_host_without_ssh_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/absent")
    group = ranks_by_ssh(["192.0.2.7"], 1, [], CheckOptions())
    group.close()
    assert group.missing == {0: "there is no ssh command on this host"}
    assert group.fixes == {0: ("sudo apt install openssh-client",)}
    assert ask_host("192.0.2.7", ()).ssh == group.missing[0]


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


def test_the_rank_that_fails_is_named(tmp_path: Path) -> None:
    """Rank 1 finds another torch than rank 0."""
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 9)")
    group = ranks_here(2)
    try:
        found = try_backend(
            group, "gloo", "127.0.0.1", environ=lambda rank: {"PYTHONPATH": str(tmp_path)} if rank else {}
        )
        finding = backend_finding(group, found)
    finally:
        group.close()
    assert found.step == "start" and list(found.faults) == [1]
    assert finding.status is Status.PROBLEM and finding.subject == "gloo: start"
    assert "its process ended: killed by SIGKILL" in finding.evidence
    assert f"rank 1 on {socket.gethostname()}" in finding.evidence
    assert "rank 0 completed it" in finding.evidence


def test_what_nccl_writes_of_a_fault_stands_in_the_row(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os\n"
        "with open(os.environ['NCCL_DEBUG_FILE'], 'w') as log:\n"
        "    log.write('vm:1:1 [0] NCCL INFO NET/Socket\\nvm:1:1 [0] NCCL WARN Duplicate GPU detected\\n')\n"
        "raise RuntimeError('no communicator')\n"
    )
    group = ranks_here(2)
    try:
        found = try_backend(group, "nccl", "127.0.0.1", environ=lambda _: {"PYTHONPATH": str(tmp_path)})
    finally:
        group.close()
    finding = backend_finding(group, found)
    assert "RuntimeError: no communicator" in finding.evidence
    assert finding.evidence.endswith("NCCL's own log: vm:1:1 [0] NCCL WARN Duplicate GPU detected")


def test_ranks_here_pass_every_stage() -> None:
    group = ranks_here(2)
    try:
        found = list(examine(group, mpi=False))
    finally:
        group.close()
    assert not [finding for finding in found if finding.status is Status.PROBLEM], found
    gloo = next(finding for finding in found if finding.subject == "gloo")
    assert gloo.status is Status.OK and "all-reduce correct" in gloo.evidence


@pytest.mark.mpi
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
