"""Waiting for an mpirun, here a shell that starts ranks and then stays: signals, and Ctrl-C pressed twice."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from lightning_lockstep.launchers.mpirun import _end_with_children, _wait
from tests.harness.patience import wait_until

MPIRUN = """
trap '' INT
trap 'exit 75' USR1
for i in 0 1; do sleep 600 & done
wait
"""


def started() -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    process = subprocess.Popen(["sh", "-c", MPIRUN])
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2)
    return process, psutil.Process(process.pid).children()


@contextmanager
def sent(number: signal.Signals, times: int) -> Iterator[None]:
    """Send this process a signal after a moment, and again."""

    def send() -> None:
        for _ in range(times):
            if not over.wait(0.3):
                os.kill(os.getpid(), number)

    over, before = threading.Event(), signal.getsignal(number)
    signal.signal(number, lambda *_: None)  # what comes too early or too late does not end the tests
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(number, before)


def test_a_further_ctrl_c_ends_mpirun_and_its_ranks() -> None:
    process, ranks = started()
    try:
        with sent(signal.SIGINT, times=20):
            assert _wait(process, saves=False) == 130
    finally:
        _end_with_children(process.pid)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 2 and not alive
