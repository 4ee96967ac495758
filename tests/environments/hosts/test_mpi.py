"""Fits over MPI on two hosts with a hostfile: a host that is not ready, and a host that is lost in the midst."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.harness.cluster import Cluster, why_not
from tests.harness.patience import wait_until
from tests.models.distributed.mpi.launch import HERE, mpi_environ

# The hosts of the module's cluster, with their ssh daemons, live longer than one test.
pytestmark = [pytest.mark.mpi, pytest.mark.allow_leaks("processes", "files")]
FIT = str(HERE / "program_fit.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Cluster() as made:
        yield made


def fit_command(cluster: Cluster, folder: Path, *more: str, second: str = "") -> list[str]:
    hosts = cluster.folder / "hosts"
    hosts.write_text(f"{cluster.addresses[0]} slots=2\n{second or cluster.addresses[1]} slots=2\n")
    of_cluster = ["--hostfile", str(hosts), "--ssh", " ".join(cluster.ssh_args)]
    return [sys.executable, FIT, str(folder), "--devices", "2", "--nodes", "2", *of_cluster, *more]


ENVIRON = {**os.environ, **mpi_environ()}


def test_two_hosts_fit(cluster: Cluster, tmp_path: Path) -> None:
    code, output = cluster.run(0, fit_command(cluster, tmp_path), timeout=150, env=ENVIRON)
    assert code == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one["node"] for one in found] == [0, 0, 1, 1]
    assert len({one["weights"] for one in found}) == 1
    assert "alpha" in output and "beta" in output
    [token] = {one["token"] for one in found}
    assert token != hashlib.sha256(b"none").hexdigest(), "one secret of the job, on both hosts"


def test_a_host_whose_name_does_not_resolve(cluster: Cluster, tmp_path: Path) -> None:
    command = fit_command(cluster, tmp_path, second="no-such-host.invalid")
    code, output = cluster.run(0, command, timeout=100, env=ENVIRON)
    assert code == 1
    assert "Not every host is ready" in output and "Could not resolve hostname" in output


def ranks_on(cluster: Cluster, host: int) -> list[int]:
    found = []
    for pid in cluster.pids_on(host):
        with suppress(psutil.NoSuchProcess):
            if FIT in psutil.Process(pid).cmdline():
                found.append(pid)
    return found


@pytest.mark.parametrize("fault", ["daemon", "cable"])
def test_a_host_is_lost_in_the_midst_of_the_run(cluster: Cluster, fault: str, tmp_path: Path) -> None:
    command = fit_command(cluster, tmp_path, "--slow", "--epochs", "500")
    process = cluster.start(0, command, env=ENVIRON)
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if "TRAINING" in line:
                break
        else:
            pytest.fail("the fit ended before it trained:\n" + "".join(printed))
        if fault == "cable":
            cluster.cut()
        else:
            daemons = [pid for pid in cluster.pids_on(1) if psutil.Process(pid).name() == "prted"]
            assert daemons
            cluster.kill(daemons)
        output, _ = process.communicate(timeout=150)
        assert wait_until(lambda: not ranks_on(cluster, 1), 60, 0.5), ranks_on(cluster, 1)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        cluster.mend()
        cluster.kill(cluster.pids_on(1))
    assert process.returncode not in (0, None), output
    # mpirun names the host in other words for a daemon whose ssh ended and for a connection that ended.
    assert "beta" in output, output
