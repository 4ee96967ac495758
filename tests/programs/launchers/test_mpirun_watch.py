"""Waiting for an mpirun that may wait for ever itself; here a shell that starts ranks and then stays."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from lightning_lockstep.launchers.mpirun import MPIRunWatch, end_with_children, ranks_under

MPIRUN = """
trap '' INT
for i in 0 1; do
    OMPI_COMM_WORLD_RANK=$i sh -c 'until [ -e "$GO" ]; do sleep 0.05; done; '"$1" &
done
wait
sleep "$2"
"""
IN_ORDER = 'touch "$ENDED/$$.ended"'
PATIENCE = 0.3


def wait(watch: MPIRunWatch, go: Path, rank: str, stays: float = 0.0) -> tuple[int, subprocess.Popen[bytes]]:
    """Watch two ranks that do something once they were seen."""
    environ = {**os.environ, "GO": str(go), "ENDED": str(watch.ended_folder)}
    process = subprocess.Popen(["sh", "-c", MPIRUN, "sh", rank, str(stays)], env=environ)
    thread = threading.Thread(target=once, args=(lambda: watch._seen is not None, go.touch))
    thread.start()
    code = watch.wait(process)
    thread.join()
    return code, process


def once(arrived: Callable[[], bool], then: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not arrived() and time.monotonic() < deadline:
        time.sleep(0.02)
    then()


def test_an_mpirun_that_outlives_ranks_which_failed_is_ended(tmp_path: Path) -> None:
    watch = MPIRunWatch(2, PATIENCE)
    code, process = wait(watch, tmp_path / "go", "kill -9 $$", stays=600)
    assert code == 1 and watch.overdue
    assert process.returncode == -signal.SIGKILL
    assert not watch.ended_folder.exists()


def test_an_mpirun_whose_ranks_here_ended_in_good_order_may_stay(tmp_path: Path) -> None:
    """Ranks on other hosts may still be at work."""
    watch = MPIRunWatch(2, PATIENCE)
    code, _ = wait(watch, tmp_path / "go", IN_ORDER, stays=5 * PATIENCE)
    assert code == 0 and not watch.overdue and not watch.unexplained and watch.failure is None


def test_an_end_is_unexplained_where_no_rank_here_came_to_one(tmp_path: Path) -> None:
    watch = MPIRunWatch(2, patience=60.0)
    wait(watch, tmp_path / "go", "true")
    assert watch.unexplained and watch.failure is None


def test_the_second_ctrl_c_ends_mpirun_and_its_ranks(tmp_path: Path) -> None:
    found: list[psutil.Process] = []
    watch = MPIRunWatch(2, PATIENCE)
    process = subprocess.Popen(
        ["sh", "-c", MPIRUN, "sh", "true", "600"], env={**os.environ, "GO": str(tmp_path / "never")}
    )

    def press_twice() -> None:
        once(lambda: len(ranks_under(process.pid)) == 2, lambda: found.extend(ranks_under(process.pid)))
        for number in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            once(lambda n=number: watch._interrupts >= n, lambda: None)  # type: ignore[misc]

    thread = threading.Thread(target=press_twice)
    thread.start()
    try:
        assert watch.wait(process) == 130
    finally:
        end_with_children(process.pid)
    thread.join()
    _, alive = psutil.wait_procs(found, timeout=20)
    assert len(found) == 2 and not alive


def test_a_failed_start_is_mpirun_s_own_matter() -> None:
    """Without a rank that was ever seen, mpirun alone knows what goes on."""
    watch = MPIRunWatch(2, patience=0.0)
    process = subprocess.Popen(["sh", "-c", "sleep 0.5; exit 7"])
    assert watch.wait(process) == 7 and not watch.overdue
