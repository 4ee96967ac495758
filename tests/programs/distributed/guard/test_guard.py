"""The guard of a run: its settings on several ranks, where the main thread is, and how an error gets there."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.guard import rank_state
from lightning_lockstep.distributed.guard.activity import Activity
from lightning_lockstep.distributed.guard.collective_call import CollectiveCall
from lightning_lockstep.distributed.guard.guard import MainThreadErrors, guard_on
from lightning_lockstep.distributed.guard.rank_state import Position, RankObserver, position
from lightning_lockstep.distributed.guard.records import CallHistory, GroupHistory
from lightning_lockstep.distributed.guard.verify import CallVerifier, MessageRecorder
from lightning_lockstep.distributed.guard.watch import CollectiveWatch, GuardSettings
from lightning_lockstep.distributed.side_channel.channel import LocalSideChannel
from lightning_lockstep.errors import CollectiveStallError, ConfigurationError
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.helpers import run_ranks


def two_guards() -> tuple[str, list[str]]:
    """Another guard on each rank; then the same, of three kinds one after the other."""
    channel = current_communicator().side_channel
    propagation = propagation_on(channel)
    error = ""
    try:
        guard_on(channel, propagation, GuardSettings(guard="watch" if channel.rank else "verify"))
    except ConfigurationError as raised:
        error = str(raised)
    kinds: list[Any] = ["watch", "verify", "off", "watch"]
    sums = []
    for kind in kinds:
        guard = guard_on(channel, propagation, GuardSettings(guard=kind))
        assert (guard is None) == (kind == "off")
        assert guard_on(channel, propagation, GuardSettings(guard=kind)) is guard
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        sums.append(str(tensor.tolist()))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("lockstep-guard") <= 2, "one that was stopped may still be on its way out"
    return error, sums


def test_all_ranks_have_the_same_guard_and_may_change_it_between_fits() -> None:
    errors, sums = zip(*run_ranks(2, two_guards, timeout=60), strict=True)
    assert sums[0] == sums[1] == ["[2.0, 2.0]"] * 4
    (told,) = [error for error in errors if error]
    assert "on another rank: expected the same on all" in told and "LOCKSTEP_DEBUG" in told


def test_the_place_of_the_main_thread_is_that_of_the_program() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(position(threading.main_thread())))
    thread.start()
    thread.join()
    assert found[0].site.startswith("test_guard.py:") and found[0].site.endswith(
        "in test_the_place_of_the_main_thread_is_that_of_the_program"
    )


def where_receives_wait(guard: Any) -> list[tuple[str, list[str]]]:
    """What another thread of rank 0 finds of ways to receive while its main thread is in them."""
    recorder = CallVerifier() if guard == "verify" else MessageRecorder()
    recorder.start()
    store, found = dist.distributed_c10d._get_default_store(), []
    ways = [
        lambda: dist.irecv(torch.ones(2), 1).wait(),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(2), 1)])[0].wait(),
        lambda: dist.recv(torch.ones(2), 1),
        lambda: dist.recv_object_list([None], 1),
    ]
    for number, receive in enumerate(ways):
        if dist.get_rank() == 1:
            store.wait([f"looked {number}"])
            send = dist.send_object_list if number == 3 else dist.send
            send([1] if number == 3 else torch.ones(2), 0)  # type: ignore[operator]
            continue

        def look(key: str = f"looked {number}") -> None:
            while position(threading.main_thread()).function not in ("wait", "recv"):
                time.sleep(0.01)
            messages = [one.call.title for one in recorder.messages()]
            found.append((position(threading.main_thread()).function, messages))
            store.set(key, "")

        looking = threading.Thread(target=look)
        looking.start()
        receive()  # type: ignore[operator]
        looking.join()
    assert recorder.messages() == []
    recorder.stop()
    return found


@pytest.mark.parametrize("guard", ["watch", "verify"])
def test_sends_and_receives_are_known_while_they_are_waited_for(guard: str) -> None:
    found, _ = run_ranks(2, where_receives_wait, guard, timeout=60)
    assert found == [(function, ["recv from 1"]) for function in ("wait", "wait", "recv", "recv")]


def test_handles_that_nobody_waits_for_are_let_go_of() -> None:
    class Pending:
        def is_completed(self) -> bool:
            return False

    history = CallHistory(2)
    group = GroupHistory(history)
    for number in range(100):
        group.uncounted(CollectiveCall(operation="send", group="world", root=number)).started(Pending())
    assert [one.call.root for one in history.messages()] == list(range(36, 100))


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


AT_THE_END = """
import atexit, threading, time
from lightning_lockstep.distributed.guard.guard import MainThreadErrors

errors = MainThreadErrors()
errors.install()

@atexit.register
def end():
    threading.Thread(target=errors.raise_soon, args=[ValueError("too late")], daemon=True).start()
    time.sleep(0.5)
    print("still there:", errors.take())
"""


def test_a_program_that_is_at_its_end_gets_no_error() -> None:
    """Python would print "Exception ignored in atexit callback", and go on."""
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert done.stdout == "still there: too late\n" and "ignored" not in done.stderr, done.stderr


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
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(1.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    observer = RankObserver(LocalSideChannel(), [], messages=list, window=60.0, store_port=0)
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
        send = partial(one.sendall, b"x")
        looking = threading.Thread(target=look, args=[send], name="lockstep-test")
        looking.start()
        assert stream.read(1) == b"x"
        looking.join()
        reads = threading.Thread(target=stream.read, args=[1])
        reads.start()  # this thread waits for another one that reads
        looking = threading.Thread(target=look, args=[send], name="lockstep-test")
        looking.start()
        reads.join()
        looking.join()
    assert seen == [True, True, True]


def test_waiting_for_a_connection_of_somebody_is_not_moving() -> None:
    observer = RankObserver(LocalSideChannel(), [], messages=list, window=60.0, store_port=0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=lambda: server.accept()[0].close())
        accepting.start()
        still = comes_to_rest(observer)
        socket.create_connection(server.getsockname()).close()
        accepting.join()
    assert still


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count it")
def test_child_processes_that_have_ended_between_two_looks_count() -> None:
    activity = Activity(60.0, lambda pid: False)
    on_own_thread(activity.look)
    for _ in range(3):
        subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"], check=True)
    on_own_thread(activity.look)
    assert activity.moves


def what_gloo_sends(count: int) -> float:
    """How much more this process has written, by the counters of its system, once it has reduced so many bytes."""
    before = psutil.Process().io_counters().write_chars
    dist.all_reduce(torch.ones(count // 4))
    return float(psutil.Process().io_counters().write_chars - before)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count it")
def test_data_of_gloo_counts_as_written() -> None:
    assert min(run_ranks(2, what_gloo_sends, 4 << 20, timeout=60)) > 1 << 20


def looks(activity: Activity, seconds: float) -> None:
    """Let an activity take samples, as a thread of the guard does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        activity.look()
        time.sleep(0.05)


def moves_while(function: Any, *, named: str = "pool-0", expected: bool = False) -> bool:
    """Return whether this thread moves that waits for another one, which does something.

    On a busy machine the other one may get no core for a while: what is expected is waited for.
    """
    activity, ended = Activity(60.0, lambda pid: True), threading.Event()

    def work() -> None:
        while not ended.is_set():
            function()

    working = threading.Thread(target=work, name=named)
    end = time.monotonic() + (20 if expected else 0)
    working.start()
    while True:
        looking = threading.Thread(target=looks, args=(activity, 0.6), name="lockstep-test")
        looking.start()
        looking.join()
        if activity.moves == expected or time.monotonic() > end:
            break
        activity.forget()
    ended.set()
    working.join()
    return activity.moves


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_thread_that_waits_for_another_one_moves_with_that() -> None:
    assert moves_while(lambda: sum(range(100_000)), expected=True)
    assert not moves_while(lambda: time.sleep(0.02)), "it only polls"
    assert not moves_while(lambda: sum(range(100_000)), named="lockstep-guard"), "that one is ours"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("reads", [True, False])
def test_one_long_write_is_moving_as_long_as_somebody_reads(reads: bool) -> None:
    taken, given = os.pipe()
    activity, moved, size = Activity(60.0, lambda pid: True), list[bool](), 4 << 20

    def read() -> None:
        time.sleep(0.1)
        if not reads:
            deadline = time.monotonic() + 20
            while activity.moves and time.monotonic() < deadline:
                looks(activity, 0.6)
            moved.append(activity.moves)
        left = size
        while left:
            left -= len(os.read(taken, 1 << 16))
            if left:
                activity.look()
                time.sleep(0.01)
        moved.append(activity.moves)

    reading = threading.Thread(target=read, name="lockstep-test")
    reading.start()
    assert os.write(given, bytes(size)) == size
    reading.join()
    os.close(taken)
    os.close(given)
    assert moved[0] == reads


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
        ({"logger": True, "fast_dev_run": True}, None),
        ({"default_root_dir": "s3://bucket/run", "logger": False}, None),
    ]
    for options, expected in given:
        trainer = Trainer(accelerator="cpu", enable_checkpointing=False, **options)
        supervisor.attach(trainer)
        assert supervisor._folder() == expected
