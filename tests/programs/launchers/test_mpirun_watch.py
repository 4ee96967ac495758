"""Waiting for an mpirun, here a shell that starts ranks and then stays: signals, and Ctrl-C pressed twice."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time

import psutil

from lightning_lockstep.launchers.mpirun import _end_with_children, _wait

MPIRUN = """
trap '' INT
for i in 0 1; do sleep 600 & done
wait
"""


def started() -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    process = subprocess.Popen(["sh", "-c", MPIRUN])
    deadline = time.monotonic() + 60
    while len(psutil.Process(process.pid).children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    return process, psutil.Process(process.pid).children()


def test_a_signal_goes_to_mpirun_and_is_its_exit_code() -> None:
    process, ranks = started()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert _wait(process, False) == 128 + signal.SIGTERM
    for rank in ranks:  # a shell leaves them; mpirun ends its ranks
        rank.kill()


def test_the_second_ctrl_c_ends_mpirun_and_its_ranks() -> None:
    process, ranks = started()

    def press_twice() -> None:
        for _ in (1, 2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    thread = threading.Timer(0.2, press_twice)
    thread.start()
    try:
        assert _wait(process, False) == 130
    finally:
        _end_with_children(process.pid)
    thread.join()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 2 and not alive


def test_a_failed_start_is_mpirun_s_own_matter() -> None:
    assert _wait(subprocess.Popen(["sh", "-c", "exit 7"]), False) == 7
