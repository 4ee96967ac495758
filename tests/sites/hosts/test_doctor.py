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

from tests.common.distributed.mpi.launch import mpi_environ, why_no
from tests.helpers.cluster import Cluster, why_not

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
    of_cluster = ["--hosts", ",".join(cluster.addresses), "--ssh-args", " ".join(cluster.ssh_args)]
    command = [sys.executable, "-m", "lightning_lockstep.doctor", *checks, *of_cluster, "--json"]
    code, output = cluster.run(0, command, timeout=150, env={**os.environ, **mpi_environ()})
    found = json.loads(output[output.index("{") :])
    return code, {check["check"]: check["findings"] for check in found["checks"]}


def told(rows: list[dict[str, Any]], status: str, subject: str) -> str:
    """Return the evidence of the rows with that status and subject."""
    return "\n".join(
        r["evidence"] for r in rows if r["status"] == status and r["subject"].startswith(subject)
    )


@contextmanager
def firewall(cluster: Cluster) -> Iterator[None]:
    """Let beta drop what comes to ports from 10000 on; its ssh daemon listens below."""
    space = ["ip", "-n", cluster.spaces[1], "rule"]
    drop = [
        "pref",
        "50",
        "iif",
        cluster.cables[1],
        "ipproto",
        "tcp",
        "dport",
        "10000-65534",
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
def test_names_that_do_not_resolve_and_the_interface_that_gloo_then_takes(cluster: Cluster) -> None:
    code, rows = doctor(cluster, "network")
    network = rows["network"]
    assert code == 1
    assert "alpha cannot resolve beta" in told(network, "warning", "host names")
    assert "beta: its own name cannot be resolved" in told(network, "problem", "interfaces")
    failed = told(network, "problem", "gloo: rendezvous")
    assert "rank 0 on alpha" in failed or "rank 1 on beta" in failed
    assert "remote=[127.0.0.1]" in failed
    # What is advised is what was tried, and worked.
    [cured] = [row for row in network if row["subject"] == "gloo, second try"]
    assert "it works with GLOO_SOCKET_IFNAME set" in cured["evidence"]
    assert f"export GLOO_SOCKET_IFNAME={cluster.cables[1]}  # on beta" in cured["fix"]


@pytest.mark.mpi
def test_a_firewall_that_lets_ssh_through_is_named_with_host_port_and_interface(cluster: Cluster) -> None:
    with firewall(cluster):
        code, rows = doctor(cluster, "network")
    blocked = told(rows["network"], "problem", "connections")
    assert code == 1
    assert f"alpha does not reach beta on ports above 1024: {cluster.addresses[1]}:" in blocked
    assert f"from interface {cluster.cables[0]}: no answer" in blocked


@pytest.mark.mpi
def test_a_cut_link_is_a_host_that_does_not_report(cluster: Cluster) -> None:
    cluster.cut()
    try:
        code, rows = doctor(cluster, "network")
    finally:
        cluster.mend()
    missing = told(rows["network"], "problem", "ranks")
    assert code == 1 and f"rank 1 of 2 did not report: on {cluster.addresses[1]}" in missing
    assert "unreachable" in missing or "timed out" in missing or "No route" in missing


@pytest.mark.mpi
def test_ssh_is_refused(cluster: Cluster) -> None:
    cluster.stop_sshd()
    try:
        code, rows = doctor(cluster, "kernel", "network", "mpi")
    finally:
        cluster.start_sshd(1)
    assert code == 1
    beta = cluster.addresses[1]
    assert f"{beta}: nothing listens for ssh there" in told(rows["hosts"], "problem", "host")
    assert f"on {beta}, nothing listens for ssh there" in told(rows["network"], "problem", "ranks")
    if why_no("open_mpi") is None:
        assert f"{beta}: nothing listens for ssh there" in told(rows["mpi"], "problem", "host")
    assert f"{cluster.addresses[0]}: " in told(rows["kernel"], "ok", ""), rows["kernel"]


@pytest.mark.mpi
def test_every_host_in_one_table(cluster: Cluster) -> None:
    code, rows = doctor(cluster, "packages", "mpi")
    assert "hosts" not in rows
    assert "all 2 hosts: " in told(rows["packages"], "ok", "Python")
    if why_no("open_mpi") is None:
        assert code == 0, rows
        assert "it started a process on each of the 2 hosts" in told(rows["mpi"], "ok", "mpirun hostname")


@pytest.mark.mpi
def test_shared_memory_that_is_too_small(cluster: Cluster) -> None:
    small = "mount -t tmpfs -o size=16m none /dev/shm"
    command = [sys.executable, "-m", "lightning_lockstep.doctor", "network", "--json"]
    code, output = cluster.run(
        0,
        ["sh", "-c", f'{small}; exec "$@"', "sh", *command],
        timeout=150,
        env={**os.environ, **mpi_environ()},
    )
    rows = json.loads(output[output.index("{") :])["checks"][0]["findings"]
    assert "alpha: /dev/shm has 16 MiB" in told(rows, "warning", "shared memory"), output
    assert code == 0 and told(rows, "ok", "gloo")
