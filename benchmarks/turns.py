"""Trainings that are all alive at once and make some steps in turn, so that they are compared within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore

from benchmarks.engine import Samples
from tests.harness import run_ranks

_LIMIT = timedelta(seconds=120)  # to wait for a turn: others start meanwhile, or have failed


@dataclass
class Turns:
    """What one rank of a training calls at the start of each step, and how long its steps took."""

    port: int
    name: str
    names: list[str]
    ranks: int
    steps: int  # in each turn
    turns: int
    seconds: list[float] = field(default_factory=list)  # of a step, a mean for each turn
    _made: int = 0

    @property
    def total(self) -> int:
        """How many steps to make; the start of the last ends the last turn."""
        return self.steps * self.turns + 1

    def step(self) -> None:
        """Wait for the turn where one begins, and pass it on where one has ended."""
        turn, others = divmod(self._made, self.steps)
        self._made += 1
        if others:
            return
        if turn == 0:
            self._store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=_LIMIT)
            if self._store.add("started", 1) == self.ranks * len(self.names):
                self._store.set(f"0 {self.names[0]}", "")
        else:
            self.seconds.append((time.perf_counter() - self._began) / self.steps)
            self._pass_on(turn - 1)
        if turn < self.turns:
            self._store.wait([f"{turn} {self.name}"])
            self._began = time.perf_counter()

    def _pass_on(self, turn: int) -> None:
        if self._store.add(f"{turn} {self.name} has ended", 1) < self.ranks:
            return
        following = self.names.index(self.name) + 1
        if following == len(self.names):
            turn, following = turn + 1, 0
        self._store.set(f"{turn} {self.names[following]}", "")


def in_turn(
    train: Callable[[Turns], None], names: list[str], *, ranks: int, steps: int, turns: int, warmup: int = 1
) -> Samples:
    """Return how long a step took in each turn [s], of the slowest rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)

    def samples(name: str) -> list[float]:
        own = Turns(store.port, name, names, ranks, steps, turns + warmup)
        of_ranks = run_ranks(ranks, _trained, train, own, backend=None, timeout=500, env=_ONE_THREAD)
        return [max(of_turn) for of_turn in zip(*of_ranks, strict=True)][warmup:]

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(samples, names), strict=True))


_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def _trained(train: Callable[[Turns], None], turns: Turns) -> list[float]:
    train(turns)
    return turns.seconds
