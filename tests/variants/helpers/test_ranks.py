"""The rank runner itself: answers, failures, time limit, safety of the fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers import RankError, RankTimeoutError, run_ranks


def facts() -> dict[str, Any]:
    from torch.utils.cpp_extension import _get_build_directory

    server = Path(f"/proc/{os.getppid()}")
    leader = int(server.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
    return {
        "env": {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "EXTRA")},
        "python_threads": threading.active_count(),
        "server_threads": len(list(Path(f"/proc/{leader}/task").iterdir())),
        "own_threads": len(list(Path("/proc/self/task").iterdir())),
        "cuda": torch.cuda.is_initialized(),
        "group": dist.is_initialized(),
        "lightning": "lightning.pytorch" in sys.modules,
        "lockstep": "lightning_lockstep" in sys.modules,
        "cwd": os.getcwd(),
        "builds": _get_build_directory("some_op", verbose=False),
        "child": subprocess.Popen(["sleep", "600"]).pid,
    }


def raise_on_one() -> None:
    print("a word on standard output")
    if dist.get_rank() == 1:
        raise ValueError("the message of the fault")
    dist.barrier()


def wait_and_stop_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    a_place_to_wait()


def a_place_to_wait() -> None:
    time.sleep(600)


def test_a_rank_begins_and_ends_like_a_process_of_its_own() -> None:
    first, second = run_ranks(2, facts, backend=None, env={"EXTRA": "given"})
    assert first["env"] == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "EXTRA": "given"}
    assert second["env"] == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "EXTRA": "given"}
    for seen in (first, second):
        assert seen["python_threads"] == 1
        assert seen["server_threads"] == 1, "a thread in the fork server would be missing in every rank"
        assert seen["own_threads"] == 1
        assert not seen["cuda"]
        assert not seen["group"]
        assert seen["lightning"]
        assert not seen["lockstep"], "the package under test must be imported by the rank itself"
        assert seen["cwd"] == os.getcwd()
        # The lock of a build that was killed would hold up every later run.
        builds = Path(seen["builds"])
        assert builds.is_relative_to(os.environ["TORCH_EXTENSIONS_DIR"]) and "lockstep-test-builds-" in str(
            builds
        )
        deadline = time.monotonic() + 5
        while _runs(seen["child"]) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _runs(seen["child"]), "what a rank has started ends with it"


def test_a_raising_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, raise_on_one, timeout=60, linger=1)
    text = str(caught.value)
    assert "ValueError: the message of the fault" in text
    assert "in raise_on_one" in text
    assert "a word on standard output" in text
    assert caught.value.outcomes[1].exception == "ValueError: the message of the fault"


def test_the_time_limit_kills_and_shows_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TESTS_PATIENCE", "1")
    with pytest.raises(RankTimeoutError, match="time limit of 3 s") as caught:
        run_ranks(2, wait_and_stop_one, timeout=3, backend=None)
    waits, stopped = caught.value.outcomes
    assert "in a_place_to_wait" in str(waits.stack) and "in a_place_to_wait" in str(caught.value)
    assert "stopped (SIGSTOP)" in str(stopped.stack)
    assert waits.killed_by_helper and stopped.killed_by_helper


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_function_that_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match="top level of a module"):
        run_ranks(1, lambda: None)
