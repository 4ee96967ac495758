"""The configuration of all ranks under plain Hydra, and where torchrun's ranks fail together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.harness import run_script
from tests.programs.application.test_ranks_share_the_config import (
    ECHO,
    SECRET,
    TRICKY,
    TRICKY_VALUE,
    echoed,
    logs,
    run_folders,
)

CAUGHT = ECHO.with_name("caught.py")


def torchrun(*arguments: str, env: dict[str, str], cwd: Path) -> Any:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *arguments,
    ]
    return run_script(command, env=env, cwd=cwd, timeout=120)


def test_ranks_of_a_program_with_plain_hydra(tmp_path: Path) -> None:
    env = {"ECHO_TO": str(tmp_path), "ECHO_FIT": "1", "ECHO_MAIN": "hydra", "ECHO_SECRET": SECRET}
    outcome = run_script([str(ECHO), TRICKY], env=env, cwd=tmp_path, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    [[first, second]] = echoed(tmp_path)
    assert first["text"] == first["copy"] == TRICKY_VALUE
    files = [path for path in tmp_path.rglob("*.*") if path.is_file() and not path.name.startswith("rank")]
    assert not [path for path in files if SECRET in path.read_text()]
    # Hydra gives rank 0's function a copy of its own, in which the clock is read again.
    first.pop("stamp"), second.pop("stamp")
    assert first == second
    assert len(run_folders(tmp_path)) == 1
    assert len(logs(tmp_path)) == 1 and "rank 1" not in logs(tmp_path)[0]


def test_a_failure_that_the_last_job_of_a_sweep_catches_lets_all_ranks_end(tmp_path: Path) -> None:
    outcome = torchrun(str(CAUGHT), "-m", "part.value=1,2", env={"ECHO_TO": str(tmp_path)}, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.output
    assert outcome.stdout.count("caught RuntimeError") == 2


def test_a_sweep_of_ranks_that_torchrun_starts(tmp_path: Path) -> None:
    env = {"ECHO_TO": str(tmp_path)}
    outcome = torchrun(str(ECHO), "-m", "part.value=1,2", TRICKY, env=env, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.output
    jobs = echoed(tmp_path, jobs=2)
    for number, (first, second) in enumerate(jobs):
        assert first == second
        assert first["part"]["value"] == number + 1
        assert first["text"] == TRICKY_VALUE
    assert [Path(name).name for name in run_folders(tmp_path)] == ["0", "1"]
    assert len(logs(tmp_path)) == 2
    assert not any("rank 1" in text for text in logs(tmp_path))
