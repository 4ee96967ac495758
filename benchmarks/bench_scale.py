"""One rank 0 with 125 to 10,000 ranks that hold their connection and do not train: its memory, its CPU, its delays."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine import Report, Table
from lightning_lockstep.distributed.failure.attempt import _FAILURE
from lightning_lockstep.distributed.rendezvous import channel_keys

_PROGRAM = Path(__file__).with_name("_scale_ranks.py")
# Ranks of one process, which answers for each in turn.
_RANKS_A_PROCESS = 500
# How long nothing is done but to keep the connections [s].
_IDLE = 20.0


class _Process:
    """One process of the simulation; a command is a line, and so is its answer."""

    def __init__(self, *given: object) -> None:
        words = [sys.executable, str(_PROGRAM), *map(str, given)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def tell(self, *command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, *command: object) -> dict[str, Any]:
        self.tell(*command)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def run(quick: bool) -> Report:
    """Each number of ranks once, in fresh processes."""
    sizes = (60, 120) if quick else (125, 500, 1000, 2000, 5000, 10000)
    figures = {}
    for size in sizes:
        print(f"{size} ranks", flush=True)
        figures[size] = _measure(size, 3.0 if quick else _IDLE)
    rows = [[name, *(f"{figures[size][name]:,.3g}" for size in sizes)] for name in figures[sizes[0]]]
    columns = ["rank 0 and so many ranks in all", *(f"{size:,}" for size in sizes)]
    notes = [
        "Rank 0 is a process with the package's own side channel and failure propagation. The other ranks are sockets"
        f" of ZeroMQ that speak the protocol (keys, heartbeats, answers), {_RANKS_A_PROCESS} in a process, on the same"
        " cores: where the table has seconds, most of them are theirs, which on a cluster have cores of their own.",
        "A failure: one rank raises; the seconds until every other rank has the record.",
    ]
    table = Table("one rank 0 and the others", columns, rows)
    return Report("The side channel at scale, simulated on one machine", [table], notes)


def _measure(size: int, idle: float) -> dict[str, float]:
    token = secrets.token_hex(32)
    key = channel_keys(token)[0].decode()
    with ExitStack() as stack:

        def started(*given: object) -> _Process:
            process = _Process(*given)
            stack.callback(process.kill)
            return process

        main = started("main", size, token)
        address = main.answer()["address"]
        rank_0 = psutil.Process(main.pid)
        alone = rank_0.memory_info().rss
        failing = started("fails", 1, size, token, address)
        failing.answer()
        crowds = [
            started("many", first, min(_RANKS_A_PROCESS, size - first), key, address)
            for first in range(2, size, _RANKS_A_PROCESS)
        ]
        for crowd in crowds:
            crowd.answer()
        began = time.monotonic()
        for crowd in crowds:
            crowd.tell("connect")
        connected = main.ask("connected")["time"] - began
        memory = rank_0.memory_info().rss - alone

        spent, began = _cpu(rank_0), time.monotonic()
        time.sleep(idle)
        idle_share = (_cpu(rank_0) - spent) / (time.monotonic() - began)

        began = time.monotonic()
        failing.ask("line")
        for crowd in crowds:
            crowd.tell("line")
        for crowd in crowds:
            crowd.answer()
        lines = main.ask("lines")["time"] - began

        main.ask("propagate")
        raised = failing.ask("fail")
        assert main.ask("failed")["rank"] == 1
        known = _last(crowds, _FAILURE, size - 2) - raised["raised"]
    return {
        "all connected, s": connected,
        "- memory of rank 0 for it, MB": memory / 1e6,
        "nothing sent: CPU of rank 0, % of a core": 100 * idle_share,
        "a line of each rank at rank 0, s": lines,
        "a failure known to the last rank, s": known,
    }


def _last(crowds: list[_Process], topic: str, expected: int) -> float:
    """Return when the last of the expected messages of a topic has come."""
    limit = time.monotonic() + 300.0
    while time.monotonic() < limit:
        found = [crowd.ask("came", topic) for crowd in crowds]
        if sum(one["count"] for one in found) >= expected:
            return max(float(one["last"]) for one in found)
        time.sleep(0.02)
    raise TimeoutError(f"{expected} messages of {topic} did not come: {found}")


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
