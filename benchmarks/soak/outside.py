"""The faults that reach a run from outside, once every rank is where they shall hit it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import zmq

from benchmarks.soak.plan import Plan
from tests.harness import Script

__all__ = ["OUTSIDE", "act"]

_RANKS_ARRIVE = 90.0  # longest wait for all ranks to reach the fault [s]


class Place(NamedTuple):
    """Where a rank is."""

    pid: int
    address: str
    """Of its side channel."""


def act(plan: Plan, script: Script, folder: Path) -> None:
    """Let the planned fault happen, if it comes from outside; then let the ranks go on."""
    if plan.fault not in OUTSIDE:
        return
    places = _wait_for_ranks(plan, script, folder)
    afterwards = OUTSIDE[plan.fault](plan, script, places)
    (folder / "go").touch()
    if afterwards is not None:
        afterwards()


def _wait_for_ranks(plan: Plan, script: Script, folder: Path) -> list[Place]:
    files = [folder / "notes" / f"{rank}.at" for rank in range(plan.ranks)]
    deadline = time.monotonic() + _RANKS_ARRIVE
    while not all(file.exists() for file in files):
        assert script.process.poll() is None, "it ended before all ranks had come as far as the fault"
        assert time.monotonic() < deadline, "the ranks did not come as far as the fault"
        time.sleep(0.02)
    return [Place(*json.loads(file.read_text())) for file in files]


Act = Callable[[Plan, Script, list[Place]], Callable[[], None] | None]


def _to_rank(number: signal.Signals) -> Act:
    return lambda plan, script, places: os.kill(places[plan.target].pid, number)


def _to_parent(number: signal.Signals) -> Act:
    return lambda plan, script, places: script.send_signal(number)


def _ctrl_c(plan: Plan, script: Script, places: list[Place]) -> None:
    script.interrupt()
    if plan.fault == "ctrl_c_twice":
        time.sleep(0.3)
        with contextlib.suppress(ProcessLookupError):
            script.interrupt()


def _stop_short(plan: Plan, script: Script, places: list[Place]) -> None:
    os.kill(places[plan.target].pid, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(places[plan.target].pid, signal.SIGCONT)


def _stop(plan: Plan, script: Script, places: list[Place]) -> Callable[[], None] | None:
    stopped = places[plan.target].pid
    os.kill(stopped, signal.SIGSTOP)
    if stopped != script.process.pid:
        return None

    def continue_after_the_others() -> None:
        """Nobody else can end the first process of a job: once the others have gone, its user continues it."""
        others = [place.pid for place in places if place.pid != stopped]
        deadline = time.monotonic() + 30
        while any(map(_runs, others)) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(stopped, signal.SIGCONT)

    return continue_after_the_others


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _strangers(plan: Plan, script: Script, places: list[Place]) -> None:
    """Write to rank 0 without the job's token: as a plain client, with a key of one's own, and no ZeroMQ at all."""
    record = {
        "rank": 1,
        "world_size": 2,
        "host": "h",
        "pid": 1,
        "kind": "exception",
        "summary": "forged failure",
    }
    forged = [b"post", json.dumps(["failure", json.dumps(record)]).encode()]
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for place in [place for place in places if place.address]:  # the other ranks listen nowhere
            for with_key in (False, True):
                client = stack.enter_context(context.socket(zmq.DEALER))
                client.linger, client.identity = 0, b"1"
                if with_key:
                    client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
                    client.curve_serverkey = zmq.curve_keypair()[0]
                client.connect(place.address)
                for _ in range(3):
                    client.send_multipart(forged, zmq.DONTWAIT)
            host, port = place.address.removeprefix("tcp://").rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=5) as plain:
                plain.sendall(os.urandom(4096))
        time.sleep(0.5)


OUTSIDE: dict[str, Act] = {
    "stop": _stop,
    "stop_short": _stop_short,
    "stranger": _strangers,
    "term_rank": _to_rank(signal.SIGTERM),
    "usr1_rank": _to_rank(signal.SIGUSR1),
    "term_parent": _to_parent(signal.SIGTERM),
    "usr1_parent": _to_parent(signal.SIGUSR1),
    "ctrl_c": _ctrl_c,
    "ctrl_c_twice": _ctrl_c,
}
