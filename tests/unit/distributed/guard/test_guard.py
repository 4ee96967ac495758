"""Where the main thread of a rank is, whether its process moves, and how an error gets there."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.guard import guard
from lightning_lockstep.distributed.guard.guard import CollectiveGuard, GuardSettings
from lightning_lockstep.distributed.guard.observer import Activity, RankObserver
from lightning_lockstep.distributed.guard.rank_state import FlightRecorder, Outstanding, Position, position
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings


def test_the_place_of_the_main_thread_is_that_of_the_program() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(position(threading.main_thread())))
    thread.start()
    thread.join()
    assert found[0].site.startswith("test_guard.py:") and found[0].site.endswith(
        "in test_the_place_of_the_main_thread_is_that_of_the_program"
    )


def test_a_rank_has_raised_as_long_as_it_deals_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has caught the error and does not come to its next collective is the cause of a stall."""
    observer, raised = (
        RankObserver(SideChannel(), FlightRecorder(), window=60.0),
        Position("train.py", ()),
    )
    observer.raised_at = raised
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "__name__", "lightning_lockstep.distributed.failure.test")
        state = on_own_thread(observer.state)
        assert state.raised and state.position == raised
    state = on_own_thread(observer.state)
    assert not state.raised and state.position != raised


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


def test_the_place_and_the_movements_are_those_of_the_thread_that_trains() -> None:
    ended, activity, found = threading.Event(), Activity(60.0, lambda pid: True), list[Any]()

    def train() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(5):
        activity.look()
        time.sleep(0.1)
    found.append(position(thread).site)
    ended.set()
    thread.join()
    assert activity.moves and found[0].endswith("in train")
    activity.look()
    assert position(thread).site == "", "it has ended"


def test_a_wait_is_asked_about_once_in_each_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the timeout before it is too long, as long again after that, anew where it is another one."""
    now, waits, asked = [0.0], list[Outstanding](), list[tuple[float, int, float]]()
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    channel = SideChannel()
    watches = CollectiveGuard(channel, propagation_on(channel), GuardSettings(stall_timeout=20.0))
    monkeypatch.setattr(watches.rank, "outstanding", lambda: waits)
    monkeypatch.setattr(
        watches._stall,
        "request",
        lambda request: asked.append((now[0], request.outstanding.number, request.seconds)),
    )
    for at, numbers in [
        (100, [7]),
        (108, [7]),
        (109, [7]),
        (118, [7]),
        (119, [7, 8]),
        (128, [8]),
        (129, [7]),
    ]:
        now[0], waits[:] = float(at), [Outstanding("world", number) for number in numbers]
        watches._look()
    # What it has seen first at 100 was called a look before that.
    assert asked == [(109.0, 7, 10.0), (119.0, 7, 20.0), (128.0, 8, 10.0)]
    assert watches._until_next_look() == 1.0
    now[0] = 137.5
    assert watches._until_next_look() == 0.5


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
