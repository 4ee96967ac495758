"""A fit under mpirun, by mpirun that the strategy starts itself, and over two hosts; and what ends it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.common.distributed.mpi.launch import (
    HERE,
    MPI_KINDS,
    PACKAGE,
    mpi_command,
    mpi_environ,
    run_program,
    why_no,
)
from tests.helpers import Script, run_script
from tests.helpers.cluster import Cluster, why_not

# The hosts of the module's cluster, with their ssh daemons, live longer than one test.
pytestmark = [pytest.mark.allow_leaks("processes", "files")]
FIT = str(HERE / "program_fit.py")


def needs(kind: str) -> None:
    reason = why_no(kind)
    if reason:
        pytest.skip(reason)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", MPI_KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fit_under_mpirun(kind: str, ranks: int, tmp_path: Path) -> None:
    needs(kind)
    outcome, found = run_program(kind, ranks, "program_fit.py", tmp_path)
    assert outcome.returncode == 0 and len(found) == ranks, outcome.output
    assert [found[rank]["rank"] for rank in range(ranks)] == list(range(ranks))
    assert {one["world"] for one in found.values()} == {ranks}
    assert {one["backend"] for one in found.values()} == {"mpi4py"}
    assert len({one["weights"] for one in found.values()}) == 1
    assert len({one["val_loss"] for one in found.values()}) == 1
    assert found[0]["best"].endswith(".ckpt")
    assert outcome.leftovers == ()


@pytest.mark.mpi
def test_the_loss_curve_is_that_of_gloo(tmp_path: Path) -> None:
    needs("open_mpi")
    curves = []
    for backend in ("mpi4py", "gloo"):
        folder = tmp_path / backend
        folder.mkdir()
        outcome, found = run_program(
            "open_mpi", 2, "program_fit.py", folder, arguments=["--backend", backend]
        )
        assert outcome.returncode == 0, outcome.output
        assert found[0]["backend"] == backend
        curves.append([found[rank]["losses"] for rank in (0, 1)])
    assert curves[0] == curves[1]


def run_fit(folder: Path, *arguments: str, timeout: float = 120.0) -> tuple[Any, dict[int, dict[str, Any]]]:
    outcome = run_script([sys.executable, FIT, str(folder), *arguments], env=mpi_environ(), timeout=timeout)
    found = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    return outcome, found


@pytest.mark.mpi
def test_it_starts_mpirun_itself_and_labels_the_output(tmp_path: Path) -> None:
    needs("open_mpi")
    outcome, found = run_fit(tmp_path, "--devices", "2", "--precision", "bf16-mixed")
    assert outcome.returncode == 0, outcome.output
    assert sorted(found) == [0, 1] and found[0]["backend"] == "mpi4py"
    assert "[rank 0] TRAINING" in outcome.stdout
    assert outcome.leftovers == ()


@pytest.mark.mpi
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_raises_ends_all_with_its_traceback_last(bad: int, tmp_path: Path) -> None:
    needs("open_mpi")
    outcome, found = run_fit(tmp_path, "--devices", "2", "--bad", str(bad))
    assert outcome.returncode != 0 and not found
    last, saved = [line for line in outcome.stderr.splitlines() if line.strip()][-2:]
    assert "ValueError: a bad batch on purpose" in last and saved.startswith("Saved to "), outcome.output
    assert outcome.leftovers == ()


@pytest.mark.mpi
def test_the_trainer_and_mpirun_disagree(tmp_path: Path) -> None:
    needs("open_mpi")
    outcome, found = run_program("open_mpi", 2, "program_fit.py", tmp_path, arguments=["--devices", "3"])
    assert outcome.returncode != 0 and not found
    assert "LaunchError: The Trainer and the program that started the ranks disagree" in outcome.output


@pytest.mark.mpi
def test_a_foreign_mpiexec_is_one_table(tmp_path: Path) -> None:
    """MPICH's mpiexec starts Pythons whose mpi4py loads Open MPI."""
    needs("mpich")
    needs("open_mpi")
    command = [*mpi_command("mpich", 2)[:-1], sys.executable, FIT, str(tmp_path)]
    outcome = run_script(command, env=mpi_environ(), timeout=90)
    assert outcome.returncode != 0
    assert "disagree about the number of ranks" in outcome.output
    assert re.search(r"MPICH's mpiexec \(environment\) +2 +[01]\n", outcome.output), outcome.output


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    needs("open_mpi")
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Cluster() as made:
        made.start_fork_servers()
        yield made


def hostfile(cluster: Cluster, *names: str) -> str:
    file = cluster.folder / "hosts"
    file.write_text("".join(f"{name} slots=2\n" for name in names or cluster.addresses))
    return str(file)


def fit_command(cluster: Cluster, folder: Path, hosts: str, *more: str) -> list[str]:
    of_cluster = ["--hostfile", hosts, "--ssh", " ".join(cluster.ssh_args)]
    return [sys.executable, FIT, str(folder), "--devices", "2", "--nodes", "2", *of_cluster, *more]


ENVIRON = {**os.environ, **mpi_environ()}


@pytest.mark.mpi
def test_two_hosts_fit(cluster: Cluster, tmp_path: Path) -> None:
    code, output = cluster.run(0, fit_command(cluster, tmp_path, hostfile(cluster)), timeout=150, env=ENVIRON)
    assert code == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one["node"] for one in found] == [0, 0, 1, 1]
    assert len({one["weights"] for one in found}) == 1
    assert "alpha" in output and "beta" in output
    [token] = {one["token"] for one in found}
    assert token != hashlib.sha256(b"none").hexdigest(), "one secret of the job, on both hosts"


@pytest.mark.mpi
def test_every_operation_between_two_hosts_gives_what_gloo_gives(cluster: Cluster, tmp_path: Path) -> None:
    program = str(Path(FIT).with_name("program_operations.py"))
    command = [*cluster.mpi_command(2), program, str(tmp_path), "--cut"]
    code, output = cluster.run(0, command, timeout=150, env=ENVIRON)
    assert code == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert [one["wrong"] for one in found] == [[]] * 4 and found[0]["cases"] > 1000


@pytest.mark.mpi
def test_a_host_whose_name_does_not_resolve(cluster: Cluster, tmp_path: Path) -> None:
    hosts = hostfile(cluster, cluster.addresses[0], "no-such-host.invalid")
    code, output = cluster.run(0, fit_command(cluster, tmp_path, hosts), timeout=100, env=ENVIRON)
    assert code == 1
    assert "Not every host is ready" in output and "its name does not resolve" in output


@pytest.mark.mpi
def test_a_host_without_the_package(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stop_sshd()
    cluster.start_sshd(1, hide=PACKAGE)
    time.sleep(1)
    try:
        command = fit_command(cluster, tmp_path, hostfile(cluster))
        code, output = cluster.run(0, command, timeout=100, env=ENVIRON)
    finally:
        cluster.stop_sshd()
        cluster.start_sshd(1)
        time.sleep(1)
    assert code == 1
    assert "install the same versions: lightning_lockstep missing there, installed here" in output


@pytest.mark.mpi
def test_ssh_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    cluster.stop_sshd()
    try:
        code, output = cluster.run(
            0, fit_command(cluster, tmp_path, hostfile(cluster)), timeout=100, env=ENVIRON
        )
    finally:
        cluster.start_sshd(1)
        time.sleep(1)
    assert code == 1
    assert "nothing listens for ssh there" in output and "Connection refused" in output


def ranks_on(cluster: Cluster, host: int) -> list[int]:
    found = []
    for pid in cluster.pids_on(host):
        with suppress(psutil.NoSuchProcess):
            if FIT in psutil.Process(pid).cmdline():
                found.append(pid)
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("fault", ["daemon", "cable", "frozen"])
def test_a_host_is_lost_in_the_midst_of_the_run(cluster: Cluster, fault: str, tmp_path: Path) -> None:
    command = fit_command(cluster, tmp_path, hostfile(cluster), "--slow", "--epochs", "500")
    process = cluster.start(0, command, env=ENVIRON)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if "TRAINING" in line:
                break
        if fault == "cable":
            cluster.cut()
        else:
            daemons = [pid for pid in cluster.pids_on(1) if psutil.Process(pid).name() == "prted"]
            assert daemons
            if fault == "daemon":
                cluster.kill(daemons)
            else:  # it answers nobody any more, and a rank beside it fails and asks it to end the job
                for pid in daemons:
                    os.kill(pid, signal.SIGSTOP)
                os.kill(ranks_on(cluster, 1)[0], signal.SIGTERM)
        output, _ = process.communicate(timeout=150)
        deadline = time.monotonic() + 60
        while (left := ranks_on(cluster, 1)) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not left, [psutil.Process(pid).as_dict(["pid", "status", "cmdline"]) for pid in left]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        cluster.mend()
        cluster.kill(cluster.pids_on(1))
    assert process.returncode not in (0, None), output
    if fault == "frozen":
        assert "SIGTERMException" in output and "is frozen" in output, output
        assert process.returncode == 1
    else:
        assert "lost" in output or "vanished" in output, output


@pytest.mark.mpi
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_the_terminal_ends_mpirun_and_all_ranks(times: int, tmp_path: Path) -> None:
    needs("open_mpi")
    command = [sys.executable, FIT, str(tmp_path), "--devices", "2", "--slow", "--epochs", "500"]
    with Script(command, env=mpi_environ()) as script:
        script.wait_for("TRAINING")
        assert len(script.descendants()) >= 3  # mpirun and the ranks
        for _ in range(times):
            script.interrupt()
            time.sleep(0.3)
        outcome = script.finish(timeout=60)
    assert outcome.returncode == 130 and outcome.leftovers == (), outcome.output
    assert "Traceback" not in outcome.output, outcome.output
