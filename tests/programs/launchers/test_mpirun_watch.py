"""Waiting for an mpirun that may wait for ever itself; here a program that starts ranks and then stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from lightning_lockstep.launchers.mpirun import MPIRunWatch, ranks_under

MPIRUN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank, stays = sys.argv[1:3]
    ranks = [
        subprocess.Popen([sys.executable, "-c", rank], env={**os.environ, "OMPI_COMM_WORLD_RANK": str(i)})
        for i in range(2)
    ]
    for process in ranks:
        process.wait()
    time.sleep(float(stays))
"""
IN_ORDER = "import os, pathlib; pathlib.Path(os.environ['ENDED'], f'{os.getpid()}.ended').touch()"
PATIENCE = 3.0


def start(watch: MPIRunWatch, rank: str, stays: float) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "ENDED": str(watch.ended_folder)}
    program = textwrap.dedent(MPIRUN)
    return subprocess.Popen(
        [sys.executable, "-c", program, "import time; time.sleep(3); " + rank, str(stays)], env=environ
    )


@pytest.mark.parametrize("rank", ["os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_an_mpirun_that_outlives_ranks_which_failed_is_ended(rank: str) -> None:
    watch = MPIRunWatch(2, PATIENCE)
    process = start(watch, "import os; " + rank, stays=600)
    code = watch.wait(process)
    assert code == 1 and watch.overdue
    assert process.returncode == -signal.SIGKILL
    assert not watch.ended_folder.exists()


def test_an_mpirun_whose_ranks_here_ended_in_good_order_may_stay() -> None:
    """Ranks on other hosts may still be at work."""
    watch = MPIRunWatch(2, PATIENCE)
    code = watch.wait(start(watch, IN_ORDER, stays=PATIENCE + 6))
    assert code == 0 and not watch.overdue


@pytest.mark.parametrize(
    ("rank", "unexplained"),
    [("pass", True), (IN_ORDER, False), (IN_ORDER.replace(".ended", ".error"), False)],
)
def test_an_end_is_unexplained_where_no_rank_here_came_to_one(rank: str, unexplained: bool) -> None:
    """Not so where each has printed an error that all of them raise."""
    watch = MPIRunWatch(2, PATIENCE)
    watch.wait(start(watch, rank, stays=0))
    assert watch.unexplained == unexplained and watch.failure is None


def test_ranks_that_live_are_never_late() -> None:
    watch = MPIRunWatch(2, patience=0.0)
    code = watch.wait(start(watch, "time.sleep(5); " + IN_ORDER, stays=0))
    assert code == 0 and not watch.overdue


def test_the_second_ctrl_c_ends_mpirun_and_its_ranks() -> None:
    watch = MPIRunWatch(2, PATIENCE)
    process = start(watch, "time.sleep(600)", stays=600)
    found: list[psutil.Process] = []

    def press_twice() -> None:
        while len(found) < 2:
            found[:] = ranks_under(process.pid)
            time.sleep(0.05)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    threading.Thread(target=press_twice, daemon=True).start()
    assert watch.wait(process) == 130
    _, alive = psutil.wait_procs(found, timeout=20)
    assert not alive


def test_a_failed_start_is_mpirun_s_own_matter() -> None:
    """Without a rank that was ever seen, mpirun alone knows what goes on."""
    watch = MPIRunWatch(2, patience=0.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5); raise SystemExit(7)"])
    assert watch.wait(process) == 7 and not watch.overdue
