"""Programs that are asked before ranks are started: mpirun itself, and mpirun on the hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpirun_command import (
    MPIRun,
    MPIRunSettings,
    check_hosts,
    find_mpirun,
    mpirun_fault,
)
from tests.harness.patience import wait_until


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def is_running(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_what_a_failed_mpirun_has_started_does_not_stay(tmp_path: Path) -> None:
    program = script(tmp_path / "mpirun", "sleep 600 >/dev/null 2>&1 &\necho $!\nexit 3")
    fault = mpirun_fault(["node1"], MPIRun(str(program), "open_mpi", ""), MPIRunSettings())
    assert "failed with exit code 3" in fault
    pid = int(fault.split()[-1])
    assert wait_until(lambda: not is_running(pid), 60), "what mpirun had started runs on"


@pytest.mark.parametrize(("name", "why"), [("absent", "not found"), ("", "Permission denied")])
def test_an_mpirun_that_cannot_be_run_is_refused(name: str, why: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    with pytest.raises(LaunchError, match=f"mpirun='{path}' cannot be run: .*{why}"):
        find_mpirun(MPIRunSettings(mpirun=path))


SSH = """
for word in "$@"; do case $word in *.invalid) host=$word; esac; done
[ $host != closed.invalid ] || { echo "root@closed: Permission denied (publickey)." >&2; exit 255; }
"""


def test_the_table_of_hosts_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "ssh", SSH)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "hosts").write_text("localhost\nfine.invalid\nclosed.invalid\n")
    settings = MPIRunSettings(hostfile=tmp_path / "hosts")
    with pytest.raises(LaunchError) as caught:
        check_hosts(settings, MPIRun("false", "hydra", ""), num_nodes=3)
    rows = dict(line.split(maxsplit=1) for line in str(caught.value).splitlines()[2:])
    assert rows["localhost"] == rows["fine.invalid"] == "ready"
    assert rows["closed.invalid"].startswith("`ssh closed.invalid true` must work without asking anything: root@")
    with pytest.raises(LaunchError, match=r"`false -hosts localhost,fine\.invalid .*failed with exit code 1"):
        check_hosts(settings, MPIRun("false", "hydra", ""), num_nodes=2)
