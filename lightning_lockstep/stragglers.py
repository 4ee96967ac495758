"""Which rank the others wait for: the steps of a rank by its own clock, and the verdict of rank 0 from those of all."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from lightning_lockstep._text import plain_table, ranks_in_words

# -- How long this rank waits for others in each of its steps, and where the rest of a step goes --

Part = Literal["data loading", "forward and backward", "callbacks"]

#: Parts of a step; the second is all that the other two are not, optimizer and Lightning's own work included.
PARTS: tuple[Part, ...] = ("data loading", "forward and backward", "callbacks")


@cache
def part_of_action(action: str) -> Part | None:
    """Return what an action belongs to, by the name that Lightning's profilers know it by."""
    if action.startswith("[Callback]"):  # such as "[Callback]ModelCheckpoint{...}.on_train_batch_end"
        return "callbacks"
    return "data loading" if action.endswith(".train_dataloader_next") else None


class RankTimes(NamedTuple):
    """Where the time of a rank's step went [s]; the parts are without the waiting in them."""

    data_loading: float
    forward_and_backward: float
    callbacks: float
    waiting: float


class _Wait(NamedTuple):
    part: Part
    begin: Any  # [s] by ``time.perf_counter()``; on a GPU an event
    end: Any


class OwnStep(NamedTuple):
    """One step as this rank has measured it [s]."""

    seconds: float
    parts: dict[Part, float]  # waiting of the host included, for the loader and the callbacks
    waits: list[_Wait]

    @property
    def is_known(self) -> bool:
        """Whether the device has got to the end of the step's last wait."""
        return not self.waits or isinstance(self.waits[-1].end, float) or bool(self.waits[-1].end.query())

    def times(self) -> RankTimes:
        parts = {**self.parts, "forward and backward": self.seconds - sum(self.parts.values())}
        waiting = 0.0
        for part, begin, end in self.waits:
            if isinstance(end, float):
                parts[part] -= end - begin
                waiting += end - begin
            else:  # the device waits, and the host goes on
                waiting += begin.elapsed_time(end) / 1000
        return RankTimes(*(round(max(0.0, each), 6) for each in (*map(parts.__getitem__, PARTS), waiting)))


class StepTimer:
    """Measures the steps of this rank with a few reads of a clock each."""

    # `enter` and `leave` are called for each action of the Trainer. What runs inside one of a part counts for that one.

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open = ""
        self._open_part: Part = "forward and backward"
        self._since = 0.0
        self._depth = 0  # of waits in waits
        self._wait_since: Any = 0.0
        self._begin: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._parts: dict[Part, float] = {"data loading": 0.0, "callbacks": 0.0}
        self._waits: list[_Wait] = []

    def interrupt(self) -> None:
        """Measure nothing until :meth:`end`: what follows is no training step."""
        self._begin = None

    def enter(self, action: str) -> None:
        part = part_of_action(action)
        if part is not None and not self._open:
            self._open, self._open_part, self._since = action, part, time.perf_counter()

    def leave(self, action: str) -> None:
        if self._open == action:
            self._parts[self._open_part] += time.perf_counter() - self._since
            self._open, self._open_part = "", "forward and backward"

    def backward_begins(self, loss: torch.Tensor) -> None:
        """Count what comes after the backward pass itself as a wait: DDP waits there for the last reduction."""
        self._depth = 0  # also after a backward pass that has failed and is tried again

        def queue(_: torch.Tensor) -> None:
            # Callbacks run in the order in which they were queued, and DDP queues its own with its last bucket.
            torch.autograd.Variable._execution_engine.queue_callback(self.wait_begins)

        if loss.requires_grad:
            loss.register_hook(queue)  # type: ignore[no-untyped-call]

    def backward_ends(self) -> None:
        if self._depth:
            self.wait_ends()

    def wait_begins(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._wait_since = self._now()

    def wait_ends(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._waits.append(_Wait(self._open_part, self._wait_since, self._now()))

    def end(self) -> OwnStep | None:
        """Return the step that ends now, or ``None`` if its begin was not seen; the next one begins."""
        begin, self._begin = self._begin, time.perf_counter()
        own = None if begin is None else OwnStep(self._begin - begin, self._parts, self._waits)
        self._clear()
        return own

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


# -- Sums over steps. Of each step the rank that waits least is the one that the others wait for --

Times = Mapping[int, RankTimes]  # of one step, of all ranks from which it came


class Sums:
    """Sums over steps, of each rank."""

    def __init__(self, world_size: int) -> None:
        self.steps, self.seconds = 0, 0.0  # the steps and their length
        self.times = numpy.zeros((world_size, len(RankTimes._fields)))
        self.seen = numpy.zeros(world_size, int)  # steps of which times of the rank came
        self.last = numpy.zeros(world_size, int)  # steps in which the others waited for the rank
        self.lost = numpy.zeros(world_size)  # how long they did, on average over them [s]
        self.squares = numpy.zeros(world_size)  # of that, step by step [s^2]

    def add(self, times: Times) -> None:
        ranks, rows = list(times), numpy.array([*times.values()])
        self.steps += 1
        self.seconds += float(numpy.median(rows.sum(axis=1)))
        self.times[ranks] += rows
        self.seen[ranks] += 1
        waiting = rows[:, RankTimes._fields.index("waiting")]
        last = int(waiting.argmin())
        lost = numpy.delete(waiting, last).mean() - waiting[last] if len(ranks) > 1 else 0.0
        self.last[ranks[last]] += lost > 0
        self.lost[ranks[last]] += lost
        self.squares[ranks[last]] += lost**2

    @property
    def means(self) -> NDArray[Any]:
        """Mean times of a step of each rank; nan if none came from it."""
        return self.times / numpy.where(self.seen, self.seen, math.nan)[:, None]

    @property
    def share(self) -> float:
        """The share of the time that was spent waiting, for any rank."""
        return float(self.lost.sum()) / self.seconds if self.seconds else 0.0


# -- The decision, from sums over many steps --

# The time lost by a rank must exceed this many standard deviations of what chance gives. It takes three slow steps; one
# is not enough, and ranks that are late in turn are not either.
_CERTAIN = 1.7
# A named rank stays named down to this share of both limits: a value near a limit must not print line after line.
_STILL_NAMED = 0.6


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which rank the others wait for."""

    rank: int | None = None  # None: the others wait for nobody, and all else is zero
    where: Part | None = None  # the part of its step that is longer than that of the others
    lost: float = 0.0  # how long the others wait for it in a step, on average over all [s]
    share: float = 0.0  # the same, of the step time
    step_seconds: float = 0.0  # mean length of a step
    slow_steps: int = 0  # about how many equally slow steps would lose as much, with the same spread
    steps: int = 0  # out of how many


NOBODY = Verdict()


def decide(sums: Sums, *, min_share: float, before: Verdict = NOBODY) -> Verdict:
    """Decide whom the others wait for; a value near a limit leaves the verdict as it was ``before``."""
    # A rank is named if waiting for it costs at least ``min_share`` of the time more than waiting for each of the
    # others does on average (if all are late in turn, nobody is slow), and if this is unlikely to be chance.
    world_size, total, rank = len(sums.lost), float(sums.lost.sum()), int(sums.lost.argmax())
    if world_size < 2 or not total:
        return NOBODY
    own = float(sums.lost[rank])
    more = own - (total - own) / (world_size - 1)
    needed = _STILL_NAMED if before.rank == rank else 1.0
    by_chance = math.sqrt(sums.squares.sum())
    if more < needed * min_share * sums.seconds or more < needed * _CERTAIN * by_chance:
        return NOBODY
    slow_steps = min(own**2 / float(sums.squares[rank]), float(sums.steps))
    # How much longer each part of its step is than that of the others.
    longer = sums.means[rank] - numpy.nanmedian(numpy.delete(sums.means, rank, axis=0), axis=0)
    return Verdict(
        rank=rank,
        where=PARTS[int(longer[: len(PARTS)].argmax())],
        lost=own / sums.steps,
        share=own / sums.seconds,
        step_seconds=sums.seconds / sums.steps,
        slow_steps=round(slow_steps),
        steps=sums.steps,
    )


# -- The verdict as the run goes on --

# A verdict rests on at most this many last steps; during a run, fewer than the second number name nobody.
_LOOK_BACK, _FEWEST = 50, 20


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the last steps have shown."""

    since: int  # first step since the last decision
    sums: Sums  # over the steps on which the verdict stands
    before: Verdict  # the one before it
    verdict: Verdict

    @property
    def changed(self) -> bool:
        """Whether another rank is named now."""
        return self.verdict.rank != self.before.rank


class StragglerTracker:
    """Takes the steps in order, and decides after every n of them."""

    def __init__(self, world_size: int, *, every_n_steps: int, min_share: float) -> None:
        self._world_size, self._every, self._min_share = world_size, every_n_steps, min_share
        self.verdict: Verdict = NOBODY
        self.total = Sums(world_size)  # over all steps so far
        self._recent: deque[Times] = deque(maxlen=max(_LOOK_BACK, every_n_steps))
        self._since: int | None = None

    def add(self, number: int, times: Times) -> Window | None:
        """Take the next step; returns the decision that it completes, if it does."""
        self.total.add(times)
        self._recent.append(times)
        self._since = number if self._since is None else self._since
        is_time = self.total.steps % self._every == 0 and len(self._recent) >= _FEWEST
        return self.decide_now() if is_time else None

    def decide_now(self) -> Window | None:
        """Decide on the last steps, however few they are; ``None`` if none has come since the last decision."""
        if self._since is None:
            return None
        sums, before, since = Sums(self._world_size), self.verdict, self._since
        for times in self._recent:
            sums.add(times)
        self.verdict, self._since = decide(sums, min_share=self._min_share, before=before), None
        return Window(since=since, sums=sums, before=before, verdict=self.verdict)

    def conclusion(self) -> Verdict:
        return decide(self.total, min_share=self._min_share)


# -- What rank 0 prints and logs of it --

Hosts = Mapping[int, str]


def change_line(window: Window, hosts: Hosts) -> str:
    """Return the line that says that the others wait for another rank now, or for none any more."""
    now, before = window.verdict, window.before
    if now.rank is None and before.rank is not None:
        named = _named(before.rank, hosts)
        return f"StragglerMonitor: since step {window.since} the others no longer wait for {named}."
    return f"StragglerMonitor: since step {window.since}: {_sentence(now, hosts)}"


def report(tracker: StragglerTracker, hosts: Hosts, missing: Collection[int] = ()) -> str:
    total, verdict = tracker.total, tracker.conclusion()
    said = "the ranks could not be compared, because they waited in none of the measured steps."
    if total.lost.any() and verdict.rank is None:
        said = f"no rank stands out; the ranks waited for each other in {total.share:.0%} of the time."
    elif total.lost.any():
        said = _sentence(verdict, hosts)
    lines = [_table(total, hosts)] if total.steps else []
    if missing:
        lines += [f"StragglerMonitor: no step times came from {ranks_in_words(missing)}, which are left out."]
    return "\n".join([*lines, f"StragglerMonitor: {said}"])


def figures(window: Window) -> dict[str, float]:
    sums, verdict = window.sums, window.verdict
    return {
        "straggler/rank": float(-1 if verdict.rank is None else verdict.rank),
        "straggler/lost_share": sums.share,
        "straggler/lost_seconds": float(sums.lost.sum()) / sums.steps,
        "straggler/step_seconds": sums.seconds / sums.steps,
    }


def _sentence(verdict: Verdict, hosts: Hosts) -> str:
    assert verdict.rank is not None
    lost, step = verdict.lost * 1000, verdict.step_seconds * 1000
    return (
        f"{_named(verdict.rank, hosts)} is slow in about {verdict.slow_steps} of {verdict.steps} steps: the others wait"
        f" {lost:.0f} ms of each {step:.0f} ms step for it ({verdict.share:.0%}), in {verdict.where}."
    )


def _named(rank: int, hosts: Hosts) -> str:
    return f"rank {rank} (host {hosts[rank]})" if rank in hosts else f"rank {rank}"


def _table(sums: Sums, hosts: Hosts) -> str:
    headings = ("rank", "host", *PARTS, "waiting", "was last", "share of lost time")
    rows = []
    for rank, means in enumerate(sums.means):
        times = [f"{seconds * 1000:.1f}" for seconds in means] if sums.seen[rank] else ["-"] * 4
        share = f"{sums.lost[rank] / (sums.lost.sum() or 1):.0%}"
        rows.append((rank, hosts.get(rank, "-"), *times, sums.last[rank], share))
    title = "StragglerMonitor: means of a step [ms], how often a rank was last"
    return f"{title}\n{plain_table(headings, rows)}"
