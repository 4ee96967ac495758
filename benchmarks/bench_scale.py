"""One rank 0 with 125 to 10,000 ranks that hold their connection and do not train: its memory, its CPU, its delays."""

from __future__ import annotations

import json
import math
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from benchmarks.engine import Report, Table
from lightning_lockstep.distributed.rendezvous import channel_keys

_PROGRAM = Path(__file__).with_name("_scale_ranks.py")
# Ranks of one process, which answers for each in turn.
_RANKS_A_PROCESS = 500
# How long nothing is done but to keep the connections [s].
_IDLE = 20.0
# Up to so many ranks an entry of each is gathered and given to all: the sockets of this machine have to read it all.
_GATHERED = 2000
_LINE = "scale/line"


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
    rows = []
    for name in next(iter(figures.values())):
        values = [figures[size][name] for size in sizes]
        known = [(size, value) for size, value in zip(sizes, values, strict=True) if not math.isnan(value)]
        slope = statistics.linear_regression(*zip(*known, strict=True)).slope
        cells = ["" if math.isnan(value) else f"{value:,.3g}" for value in values]
        rows.append([name, *cells, f"{slope:.2g}"])
    columns = ["rank 0 and so many ranks in all", *(f"{size:,}" for size in sizes), "each rank adds"]
    table = Table("one rank 0 and the others", columns, rows)
    notes = [
        "Rank 0 is a process with the package's own side channel and failure propagation. The other ranks are sockets"
        f" of ZeroMQ that speak the protocol (keys, heartbeats, answers), {_RANKS_A_PROCESS} in a process, on the same"
        " cores: where the table has seconds, most of them are theirs, which on a cluster have cores of their own.",
        "A failure: one rank raises; the seconds until every other rank has the record. The killed: a process with its"
        " ranks gets SIGKILL; the seconds until rank 0 knows of the first and of the last of them.",
    ]
    return Report("The side channel at scale, simulated on one machine", [table], notes)


def _measure(size: int, idle: float) -> dict[str, float]:
    token = secrets.token_hex(32)
    key = channel_keys(token).public.decode()
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
        spent, began = _cpu(rank_0), time.monotonic()
        for crowd in crowds:
            crowd.tell("connect")
        connected = main.ask("connected")["time"] - began
        connecting = _cpu(rank_0) - spent
        memory = rank_0.memory_info().rss - alone

        spent, packets, began = _cpu(rank_0), _packets(), time.monotonic()
        time.sleep(idle)
        seconds = time.monotonic() - began
        idle_share, rate = (_cpu(rank_0) - spent) / seconds, (_packets() - packets) / seconds

        began = time.monotonic()
        spent = _cpu(rank_0)
        failing.ask("line")
        for crowd in crowds:
            crowd.tell("post", _LINE, ["x" * 200])
        for crowd in crowds:
            crowd.answer()
        lines, lines_cpu = main.ask("lines")["time"] - began, _cpu(rank_0) - spent

        gathers = [(math.nan, math.nan)]
        for key in ("first", "second") if size <= _GATHERED else ():
            began, spent = time.monotonic(), _cpu(rank_0)
            main.tell("gather", key)
            for crowd in crowds:
                crowd.tell("post", "gather/scale", [key, True, "RANK"])
            for crowd in crowds:
                crowd.answer()
            main.answer()
            wanted = 1 if key == "first" else 2
            last = _last(crowds, "gather/scale/result", wanted * (size - 2))
            gathers = [(last - began, _cpu(rank_0) - spent)]

        main.ask("propagate")
        spent = _cpu(rank_0)
        raised = failing.ask("fail")
        assert main.ask("failed")["rank"] == 1
        known = _last(crowds, "failure/first", size - 2) - raised["raised"]
        failure_cpu = _cpu(rank_0) - spent

        main.ask("watch")
        began = time.monotonic()
        crowds[-1].kill()
        lost_ranks = size - 2 - _RANKS_A_PROCESS * (len(crowds) - 1)
        lost = main.ask("lost", lost_ranks)
    return {
        "all connected, s": connected,
        "- CPU of rank 0 for it, s": connecting,
        "- memory of rank 0 for it, MB": memory / 1e6,
        "nothing sent: CPU of rank 0, % of a core": 100 * idle_share,
        "- packets a second, both ways": rate,
        "a line of each rank at rank 0, s": lines,
        "- CPU of rank 0 for it, s ": lines_cpu,
        "an entry of each gathered, all to all, s": gathers[-1][0],
        "- CPU of rank 0 for it, s  ": gathers[-1][1],
        "a failure known to the last rank, s": known,
        "- CPU of rank 0 for it, s   ": failure_cpu,
        "ranks killed together": lost_ranks,
        "- the first known to rank 0, s": lost["first"] - began,
        "- the last known to rank 0, s": lost["last"] - began,
    }


def _last(crowds: Sequence[_Process], topic: str, expected: int) -> float:
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


def _packets() -> int:
    return int(psutil.net_io_counters(pernic=True)["lo"].packets_recv)
