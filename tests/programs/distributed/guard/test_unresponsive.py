"""What is known of a rank that does not answer: whether its process ended, is stopped, computes or waits."""

from __future__ import annotations

import signal
import socket
import subprocess
import time

import pytest

from lightning_lockstep.distributed.guard.observer import Activity, probe_unresponsive
from lightning_lockstep.distributed.guard.rank_state import UnresponsiveRank


class Channel:
    """What a rank's channel knows of rank 1."""

    world_size = 2

    def __init__(self, host: str, pid: int, *, answers: bool = False) -> None:
        self._process, self._answers = (host, pid), answers

    def process_of(self, rank: int) -> tuple[str, int]:
        return self._process

    def has_closed(self, rank: int) -> bool:
        return False

    def answers(self, rank: int) -> bool:
        return self._answers


def found(channel: Channel, seconds: float = 0.6) -> UnresponsiveRank:
    activities, end = dict[int, Activity](), time.monotonic() + seconds
    while time.monotonic() < end:
        probe_unresponsive(channel, 1, activities)  # type: ignore[arg-type]
        time.sleep(0.05)
    return probe_unresponsive(channel, 1, activities)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "signals", "what"),
    [
        ("while :; do :; done", (), "computes"),
        ("read line", (), "does not answer"),
        ("while :; do :; done", (signal.SIGSTOP,), "is stopped, by a signal or a debugger"),
    ],
)
def test_a_silent_process_of_this_host_is_looked_at(
    command: str, signals: tuple[signal.Signals, ...], what: str
) -> None:
    with subprocess.Popen(["sh", "-c", command], stdin=subprocess.PIPE) as process:
        for number in signals:
            process.send_signal(number)
        silence = found(Channel(socket.gethostname(), process.pid))
        process.kill()
    assert silence.reason == f"its process {process.pid} {what}"
    assert silence.is_moving == (what == "computes") and silence.is_stopped == bool(signals)


@pytest.mark.parametrize("answers", [True, False])
def test_a_silent_process_of_another_host_runs_if_it_answers_heartbeats(answers: bool) -> None:
    silence = found(Channel("elsewhere", 7, answers=answers), 0.0)
    assert silence.is_moving == answers and silence.reason.endswith(" (process 7 on host elsewhere)")
