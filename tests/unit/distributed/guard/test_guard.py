"""Where the main thread of a rank is, whether its process moves, and how an error gets there."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_lockstep.distributed.guard.observer import Activity, RankObserver
from lightning_lockstep.distributed.guard.rank_state import FlightRecorder
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings


def on_own_thread(function: Any) -> Any:
    """Call something as the guard does, on a thread of this package, which does not count."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), name="lockstep-test")
    thread.start()
    thread.join()
    return found[0]


def test_computing_is_moving_and_sleeping_is_not() -> None:
    activity = Activity(60.0, lambda pid: True)
    on_own_thread(activity.look)
    assert activity.moves, "not known yet"
    time.sleep(0.5)
    on_own_thread(activity.look)
    assert not activity.moves
    activity.forget()
    on_own_thread(activity.look)
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        sum(range(1000))
    on_own_thread(activity.look)
    assert activity.moves


def comes_to_rest(observer: RankObserver) -> bool:
    """Return whether this process is seen not to move; other threads of the test run may have to end something."""
    end, moves = time.monotonic() + 30, True
    on_own_thread(observer.state)
    while moves and time.monotonic() < end:
        time.sleep(0.5)
        moves = on_own_thread(observer.state).moves
    return not moves


def test_a_thread_in_a_socket_of_python_is_taken_to_move() -> None:
    observer = RankObserver(SideChannel(), FlightRecorder(), window=60.0)
    assert comes_to_rest(observer)
    seen = list[bool]()
    one, other = socket.socketpair()

    def look() -> None:
        time.sleep(0.3)
        seen.append(observer.state().moves)
        one.sendall(b"x")

    with one, other, other.makefile("rb") as stream:
        looking = threading.Thread(target=look, name="lockstep-test")
        looking.start()
        assert stream.read(1) == b"x"
        looking.join()
    assert seen == [True]


def test_reports_go_to_the_folder_of_the_logger_or_of_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    supervisor = RankSupervisor(SupervisorSettings())
    given: list[tuple[dict[str, Any], Path | None]] = [
        ({"default_root_dir": tmp_path / "runs", "logger": False}, tmp_path / "runs"),
        ({"logger": CSVLogger(tmp_path / "logs", version=3)}, tmp_path / "logs/lightning_logs/version_3"),
        (
            {"default_root_dir": tmp_path / "runs", "logger": CSVLogger(tmp_path / "logs", version=4)},
            tmp_path / "logs/lightning_logs/version_4",
        ),
        ({"logger": False}, tmp_path),
        ({"logger": CSVLogger(tmp_path / "logs"), "fast_dev_run": True}, None),
        ({"default_root_dir": "s3://bucket/run", "logger": False}, None),
    ]
    for options, expected in given:
        trainer = Trainer(accelerator="cpu", enable_checkpointing=False, **options)
        supervisor.attach(trainer)
        assert supervisor.folder() == expected
