"""Where the main thread of a rank is, whether its process moves, and how an error gets there."""

from __future__ import annotations

import importlib
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.guard import rank_state
from lightning_lockstep.distributed.guard.activity import Activity
from lightning_lockstep.distributed.guard.guard import MainThreadErrors
from lightning_lockstep.distributed.guard.rank_state import Position, RankObserver, position
from lightning_lockstep.distributed.guard.watch import CollectiveWatch, GuardSettings
from lightning_lockstep.distributed.side_channel.channel import LocalSideChannel
from lightning_lockstep.errors import CollectiveStallError
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings


def test_the_place_of_the_main_thread_is_that_of_the_program() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(position(threading.main_thread())))
    thread.start()
    thread.join()
    assert found[0].site.startswith("test_guard.py:") and found[0].site.endswith(
        "in test_the_place_of_the_main_thread_is_that_of_the_program"
    )


@pytest.mark.parametrize("waits", [lambda: time.sleep(60), lambda: threading.Event().wait(60)])
def test_an_error_reaches_a_main_thread_that_sleeps_or_waits(waits: Any) -> None:
    before = signal.getsignal(signal.SIGURG)
    errors = MainThreadErrors()
    errors.install()
    try:
        timer = threading.Timer(0.2, errors.raise_soon, [CollectiveStallError("rank 1 never came")])
        timer.start()
        with pytest.raises(CollectiveStallError, match="rank 1 never came"):
            waits()
        timer.join()
    finally:
        errors.remove()
    assert signal.getsignal(signal.SIGURG) == before
    assert errors.take() is None


def test_an_error_is_left_to_code_that_deals_with_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "__name__", "lightning_lockstep.distributed.failure.test")
    errors = MainThreadErrors()
    errors.install()
    try:
        errors_thread = threading.Thread(target=errors.raise_soon, args=[CollectiveStallError("later")])
        errors_thread.start()
        errors_thread.join()
        time.sleep(0.05)
        assert str(errors.take()) == "later"
    finally:
        errors.remove()


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


def test_what_may_move_unseen_is_taken_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of an import, perhaps of what torch loads for the guard, and inside of Python's own sockets."""
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.8)\n")
    monkeypatch.syspath_prepend(tmp_path)
    observer = RankObserver(LocalSideChannel(), [], window=60.0, store_port=0)
    assert comes_to_rest(observer)
    seen = list[bool]()

    def look(end: Any) -> None:
        time.sleep(0.3)
        seen.append(observer.state().moves)
        end()

    imports = threading.Thread(target=importlib.import_module, args=["slow_to_import"])
    imports.start()
    time.sleep(0.1)
    looking = threading.Thread(target=look, args=[lambda: None], name="lockstep-test")
    looking.start()
    importlib.import_module("slow_to_import")
    looking.join()
    imports.join()
    one, other = socket.socketpair()
    with one, other, other.makefile("rb") as stream:
        looking = threading.Thread(target=look, args=[lambda: one.sendall(b"x")], name="lockstep-test")
        looking.start()
        assert stream.read(1) == b"x"
        looking.join()
    assert seen == [True, True]


def test_an_error_reaches_a_thread_that_trains_with_its_text() -> None:
    errors, raised, ready = MainThreadErrors(), list[BaseException](), threading.Event()
    error = CollectiveStallError("rank 1 never came")

    def train() -> None:
        errors.install()
        ready.set()
        try:
            while True:
                time.sleep(0.01)
        except CollectiveStallError as caught:
            raised.append(caught)

    thread = threading.Thread(target=train)
    thread.start()
    ready.wait()
    errors.raise_soon(error)
    thread.join()
    assert raised == [error], "the very error, and not in the main thread"
    assert errors.take() is None
    errors.raise_soon(error)  # that thread has ended; nobody else gets it


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


def test_only_a_collective_that_a_rank_stays_in_is_said_not_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Blind:
        is_recording = False

    watch = CollectiveWatch(
        LocalSideChannel(),
        [Blind()],  # type: ignore[list-item]
        GuardSettings(),
        propagation_on(LocalSideChannel()),
    )
    places = [
        *[Position("train.py:1", ("a",), "new_group")] * 2,
        *[Position("train.py:2", ("b",), "all_reduce"), Position("train.py:3", ("c",), "all_reduce")],
        Position("train.py:3", ("c",), "all_reduce"),
    ]
    remaining = iter(places)
    monkeypatch.setattr(rank_state, "position", lambda thread: next(remaining))
    assert [watch._has_seen() for _ in places] == [False] * 4 + [True]
    assert capsys.readouterr().err.count("does not see the all_reduce that rank 0 waits in") == 1


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
        assert supervisor._folder() == expected
