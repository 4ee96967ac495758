"""The doctor on two hosts: network namespaces with a cable between them, and a fault at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.harness.child_site.fork_start import FOLDER
from tests.harness.cluster import Cluster, why_not
from tests.harness.patience import patience
from tests.models.distributed.mpi.launch import mpi_environ, why_no

# The hosts of the module's cluster, with their ssh daemons, live longer than one test.
pytestmark = [pytest.mark.allow_leaks("processes", "files")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Cluster() as made:
        yield made


def doctor(cluster: Cluster, *checks: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Run the doctor on alpha; return its exit code and the rows of each check."""
    hostfile = cluster.folder / "hosts"
    hostfile.write_text("".join(f"{address}\n" for address in cluster.addresses))
    of_cluster = ["--hostfile", str(hostfile), "--ssh-args", " ".join(cluster.ssh_args)]
    command = [sys.executable, "-m", "lightning_lockstep.doctor", *checks, *of_cluster, "--json"]
    return rows_in(*cluster.run(0, command, timeout=150, env={**os.environ, **mpi_environ()}))


def network(cluster: Cluster) -> tuple[int, list[dict[str, Any]], str]:
    """Test the network as a rank on each host, started by torchrun; return exit code, rows, and what beta prints."""
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "static", "--max-restarts", "0"]
    place += ["--master-addr", cluster.addresses[0], "--master-port", "29555"]
    program = ["-m", "lightning_lockstep.doctor", "network", "--json"]
    started = [
        cluster.start(host, [sys.executable, "-m", "torch.distributed.run", *place, f"--node-rank={host}", *program])
        for host in (0, 1)
    ]
    outputs = [process.communicate(timeout=patience(200))[0] for process in started]
    code, rows = rows_in(started[0].returncode, outputs[0])
    assert started[1].returncode == code, "torchrun ends alike on both hosts"
    return code, rows["network"], outputs[1]


def rows_in(code: int, output: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    found, _ = json.JSONDecoder().raw_decode(output[output.index("{\n") :])
    return code, {check["check"]: check["findings"] for check in found["checks"]}


def told(rows: list[dict[str, Any]], status: str, subject: str) -> str:
    """Return the evidence of the rows with that status and subject."""
    return "\n".join(r["evidence"] for r in rows if r["status"] == status and r["subject"].startswith(subject))


@contextmanager
def firewall(cluster: Cluster) -> Iterator[None]:
    """Let beta drop what comes from ports above 30000: connections to it, but not answers of rank 0's store."""
    space = ["ip", "-n", cluster.spaces[1], "rule"]
    drop = [
        "pref",
        "50",
        "iif",
        cluster.cables[1],
        "ipproto",
        "tcp",
        "sport",
        "30000-65534",
        "type",
        "blackhole",
    ]
    for words in (["add", "pref", "100", "lookup", "local"], ["del", "pref", "0"], ["add", *drop]):
        subprocess.run([*space, *words], check=True)
    try:
        yield
    finally:
        subprocess.run([*space, "del", "pref", "50"], check=True)


@pytest.mark.mpi
def test_the_interface_that_gloo_takes_if_the_hosts_do_not_know_their_names(cluster: Cluster) -> None:
    code, rows, _ = network(cluster)
    assert code == 1
    assert "every host reaches the others" in told(rows, "ok", "connections")
    failed = told(rows, "problem", "gloo: rendezvous")
    assert "rank 0 on alpha" in failed or "rank 1 on beta" in failed
    assert "remote=[127.0.0.1]" in failed
    # What is advised is what was tried, and worked.
    [cured] = [row for row in rows if row["subject"] == "gloo: rendezvous"]
    assert f"It works with GLOO_SOCKET_IFNAME={cluster.cables[0]}" in cured["evidence"]
    assert "unset, gloo listens at the address that a host's own name stands for" in cured["evidence"]
    assert f"export GLOO_SOCKET_IFNAME={cluster.cables[1]}  # on beta" in cured["fix"]


def test_a_firewall_is_named_with_host_port_and_interface(cluster: Cluster) -> None:
    """Beta reaches rank 0's port, and nobody reaches those of beta."""
    with firewall(cluster):
        code, rows, _ = network(cluster)
    blocked = told(rows, "problem", "connections")
    assert code == 1
    assert f"alpha does not reach beta on ports above 1024: {cluster.addresses[1]}:" in blocked
    assert f"from interface {cluster.cables[0]}: no answer" in blocked


def test_a_cut_link_is_a_rank_that_does_not_answer(cluster: Cluster) -> None:
    """Ranks started by srun, or by hand with its variables, do not need to reach each other to start."""
    of_step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    of_step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "alpha,beta"}
    of_step |= {"MASTER_ADDR": cluster.addresses[0], "MASTER_PORT": "29556"}
    command = [sys.executable, "-m", "lightning_lockstep.doctor", "network", "--json"]
    cluster.cut()
    try:
        started = [
            cluster.start(
                host,
                command,
                env={**os.environ, **of_step, "SLURM_PROCID": str(host), "SLURM_NODEID": str(host)},
            )
            for host in (0, 1)
        ]
        outputs = [process.communicate(timeout=patience(300))[0] for process in started]
    finally:
        cluster.mend()
    code, rows = rows_in(started[0].returncode, outputs[0])
    assert code == started[1].returncode == 1
    place = f"{cluster.addresses[0]}:{of_step['MASTER_PORT']}"
    assert f"rank 1 of 2 did not report at {place} in time" in told(rows["network"], "problem", "ranks")
    assert f"rank 1 on beta does not reach rank 0 at {place}, from interface none: " in outputs[1]


@pytest.mark.mpi
def test_ssh_is_refused(cluster: Cluster) -> None:
    cluster.stop_sshd()
    try:
        code, rows = doctor(cluster, "mpi")
    finally:
        cluster.start_sshd(1)
    assert code == 1
    beta = cluster.addresses[1]
    if why_no("open_mpi") is None:
        assert f"{beta} true` must work without asking anything" in told(rows["mpi"], "problem", "host")


@pytest.mark.mpi
def test_ranks_of_mpirun_on_two_hosts(cluster: Cluster) -> None:
    command = [*cluster.mpi_command(1), "-m", "lightning_lockstep.doctor", "network", "--json"]
    code, output = cluster.run(0, command, timeout=150, env={**os.environ, **mpi_environ()})
    assert code == 0, output
    rows = rows_in(code, output)[1]["network"]
    assert told(rows, "ok", "gloo") and told(rows, "ok", "mpi4py"), rows
    assert "alpha: rank 0; beta: rank 1" in told(rows, "ok", "ranks")


@pytest.mark.mpi
def test_shared_memory_that_is_too_small(cluster: Cluster) -> None:
    small = "mount -t tmpfs -o size=16m none /dev/shm"
    command = [sys.executable, "-m", "lightning_lockstep.doctor", "network", "--json"]
    code, output = cluster.run(
        0,
        ["sh", "-c", f'{small}; unset {FOLDER}; exec "$@"', "sh", *command],  # a fork server has another /dev/shm
        timeout=150,
        env={**os.environ, **mpi_environ()},
    )
    rows = json.loads(output[output.index("{") :])["checks"][0]["findings"]
    assert "alpha: 16 MiB of /dev/shm are free" in told(rows, "warning", "shared memory"), output
    assert code == 0 and told(rows, "ok", "gloo")
