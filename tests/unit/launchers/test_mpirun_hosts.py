"""Programs that are asked before ranks are started: mpirun itself, and mpirun on the hosts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpi_hosts import Host, mpirun_fault
from lightning_lockstep.launchers.mpirun_command import MPIRun, MPIRunSettings, find_mpirun


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
    fault = mpirun_fault([Host("node1", 1)], MPIRun(str(program), "open_mpi", ""), MPIRunSettings())
    assert fault is not None and "failed with exit code 3" in fault
    pid, began = int(fault.split()[-1]), time.monotonic()
    while is_running(pid):
        assert time.monotonic() - began < 60, "what mpirun had started runs on"
        time.sleep(0.02)


@pytest.mark.parametrize(("name", "why"), [("absent", "not found"), ("", "Permission denied")])
def test_an_mpirun_that_cannot_be_run_is_refused(name: str, why: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    with pytest.raises(LaunchError, match=f"mpirun='{path}' cannot be run: .*{why}"):
        find_mpirun(MPIRunSettings(mpirun=path))
