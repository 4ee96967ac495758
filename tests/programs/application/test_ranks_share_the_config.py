"""Every rank gets the configuration of rank 0, whoever started it, and writes nothing of its own."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.harness import MODELS, reserve_port, run_script, start_script

ECHO = MODELS / "application" / "apps" / "echo.py"
TRICKY = "text='it''s, [a] \"list\": {not} a=b $1 é'".replace("''", "\\'")
SECRET = "not for everybody"
TRICKY_VALUE = 'it\'s, [a] "list": {not} a=b $1 é'


def echoed(folder: Path, jobs: int = 1) -> list[list[dict[str, Any]]]:
    """What each rank of each job wrote down."""
    found = sorted(folder.glob("rank*.json"))
    names = sorted({path.stem.split("-", 1)[1] for path in found})
    assert len(names) == jobs, found
    return [[json.loads(path.read_text()) for path in found if path.stem.split("-", 1)[1] == name] for name in names]


def run_folders(folder: Path) -> list[str]:
    return sorted(path.parent.parent.relative_to(folder).as_posix() for path in folder.rglob(".hydra/config.yaml"))


def logs(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.rglob("*.log"))]


def test_ranks_that_the_strategy_starts(tmp_path: Path) -> None:
    env = {"ECHO_TO": str(tmp_path), "ECHO_FIT": "1", "ECHO_SECRET": SECRET}
    outcome = run_script([str(ECHO), TRICKY], env=env, cwd=tmp_path, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    [[first, second]] = echoed(tmp_path)
    assert first["text"] == first["copy"] == TRICKY_VALUE
    assert first["numbers"] == [1, 2.5, "3"]
    assert first["secret"] == second["secret"] == SECRET
    written = [path for path in tmp_path.rglob("*.*") if path.is_file() and not path.name.startswith("rank")]
    assert not [path for path in written if SECRET in path.read_text()]
    [frozen] = [path for path in written if path.name == "frozen.yaml"]
    assert frozen.stat().st_mode & 0o777 == 0o600, "for this user only"
    assert first == second
    assert len(run_folders(tmp_path)) == 1
    assert len(logs(tmp_path)) == 1
    assert "rank 1" not in logs(tmp_path)[0]
    assert "rank 1 was here" in outcome.output, "its console stays"
    assert "Experimental rerun" not in outcome.output


def test_ranks_that_srun_starts(tmp_path: Path) -> None:
    with reserve_port() as port, ExitStack() as scripts:
        tasks = [
            scripts.enter_context(
                start_script([ECHO, TRICKY], env=slurm_task(number, port, ECHO_TO=str(tmp_path)), cwd=tmp_path)
            )
            for number in (1, 0)
        ]
        outcomes = [task.finish(90) for task in tasks]
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    [[first, second]] = echoed(tmp_path)
    assert first == second
    assert len(run_folders(tmp_path)) == 1


def test_nodes_started_by_hand_all_end_where_the_command_line_is_wrong(tmp_path: Path) -> None:
    """Also one that comes when rank 0 has printed the error."""
    with reserve_port() as port, ExitStack() as scripts:

        def node(number: int) -> Any:
            told = {"NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            command = [ECHO, "part=frist", "txet=1", "+trainer.num_nodes=3"]
            env = {**told, "ECHO_TO": str(tmp_path)}
            return scripts.enter_context(start_script(command, env=env, cwd=tmp_path))

        first, second = node(0), node(1)
        first.wait_for("2 errors in the configuration; nothing was started", timeout=90)
        third = node(2)  # while the second one has its message already
        outcomes = [one.finish(90) for one in (first, second, third)]
    assert [outcome.returncode for outcome in outcomes] == [2, 2, 2], outcomes
    assert [outcome.output.count("errors in the configuration") for outcome in outcomes] == [1, 0, 0], outcomes
    assert list(tmp_path.iterdir()) == []


def slurm_task(number: int, port: int, **more: str) -> dict[str, str]:
    """What srun tells each of two tasks on one node."""
    told = {
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "echo",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "here",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return {**told, **more}
