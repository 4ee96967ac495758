"""What is remembered of slow ranks over a run, and how it is told."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_lockstep._text import plain_table, ranks_in_words
from lightning_lockstep.stragglers.verdict import (
    NOBODY,
    ComparedStep,
    Losses,
    RankTimes,
    Verdict,
    decide,
    joined,
    losses_of,
)

# -- The verdict as the run goes on, when it changes, and what the whole run comes to --

# A verdict stands on the steps of the last windows, at least so many.
_LOOK_BACK = 50
# While a run goes on, fewer steps than this name nobody.
_FEWEST = 20
# Windows whose medians are kept for the table at the end.
_KEPT_WINDOWS = 1000


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one window of steps has shown."""

    first: int
    since: int  # first step since the last decision, which too few steps put off
    losses: Losses
    before: Verdict  # the one before it
    verdict: Verdict  # now, on the last windows together

    @property
    def changed(self) -> bool:
        """Whether another rank is named now, or the same in another way."""
        return (self.verdict.rank, self.verdict.kind) != (self.before.rank, self.before.kind)


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """One rank over the whole run."""

    rank: int
    times: RankTimes | None  # medians; None: nothing came from it
    last: int  # number of steps in which it was the last
    share: float  # of all the time that was spent waiting


class StragglerTracker:
    """Takes compared steps in order and decides after each window."""

    def __init__(self, world_size: int, *, every_n_steps: int, min_share: float) -> None:
        self._world_size, self._every, self._min_share = world_size, every_n_steps, min_share
        self.verdict: Verdict = NOBODY
        self.total = Losses.none(world_size)  # over all steps so far
        self._steps: list[ComparedStep] = []
        self._since_collective: ComparedStep | None = None
        self._recent: deque[Losses] = deque()
        self._undecided_since: int | None = None
        self._times: list[deque[RankTimes]] = [deque(maxlen=_KEPT_WINDOWS) for _ in range(world_size)]

    def add(self, step: ComparedStep) -> Window | None:
        """Take the next step; returns the window that it completes, if it does."""
        self._steps.append(step)
        return self._evaluate() if len(self._steps) >= self._every else None

    def finish(self) -> Window | None:
        """Return the last window, which may be shorter than the others."""
        return self._evaluate(at_least=1) if self._steps else None

    def conclusion(self) -> Verdict:
        """Return the verdict on all steps so far."""
        return decide(self.total, min_share=self._min_share)

    def ranks(self) -> list[RankSummary]:
        """Return each rank over all steps so far, in rank order."""
        lost = sum(self.total.lost)
        return [
            RankSummary(
                rank=rank,
                times=_medians(self._times[rank]) if self._times[rank] else None,
                last=self.total.last[rank],
                share=self.total.lost[rank] / lost if lost else 0.0,
            )
            for rank in range(self._world_size)
        ]

    def _evaluate(self, *, at_least: int = _FEWEST) -> Window:
        steps, self._steps = self._steps, []
        measured = self._measured(steps)
        losses = losses_of(measured, self._world_size)
        self.total += losses
        for rank, times in enumerate(self._times):
            shown = measured if self.total.steps else steps
            of_rank = [step.times[rank] for step in shown if rank in step.times]
            if of_rank:
                times.append(_medians(of_rank))
        self._recent.append(losses)
        while (
            len(self._recent) > 1
            and sum(one.steps for one in self._recent) - self._recent[0].steps >= _LOOK_BACK
        ):
            self._recent.popleft()
        before = self.verdict
        since = steps[0].step if self._undecided_since is None else self._undecided_since
        self._undecided_since = since
        together = sum(self._recent, start=Losses.none(self._world_size))
        if losses.steps and together.steps >= at_least:  # a window of which nothing is known changes nothing
            self._undecided_since = None
            self.verdict = decide(together, min_share=self._min_share, before=before)
        return Window(first=steps[0].step, since=since, losses=losses, before=before, verdict=self.verdict)

    def _measured(self, steps: Sequence[ComparedStep]) -> list[ComparedStep]:
        """Return one step for all that lies between two collectives, as where gradients are accumulated."""
        # What comes after the last collective waits for the next window.
        found: list[ComparedStep] = []
        for step in steps:
            before = self._since_collective
            self._since_collective = step if before is None else joined(before, step)
            if step.measured:
                found.append(self._since_collective)
            if (
                step.measured or len(step.times) < 2
            ):  # of less than two ranks nothing is known, not even whether
                self._since_collective = None
        return found


def _medians(times: Sequence[RankTimes]) -> RankTimes:
    return RankTimes(*(statistics.median(values) for values in zip(*times, strict=True)))


# -- What rank 0 prints and logs about stragglers --

# Beyond this number of ranks the table has those for which the others waited longest.
_LONGEST_TABLE = 64

Hosts = Mapping[int, str]


def change_line(window: Window, hosts: Hosts) -> str:
    """Return the line that says that the others wait for another rank now, or for none any more."""
    now, before = window.verdict, window.before
    if now.rank is None and before.rank is not None:
        named = _named(before.rank, hosts)
        return f"StragglerMonitor: since step {window.since} the others no longer wait for {named}."
    return f"StragglerMonitor: since step {window.since}: {_sentence(now, hosts)}"


def missing_line(ranks: Iterable[int]) -> str:
    """Return the line that names the ranks whose figures are missing."""
    return f"StragglerMonitor: no step times came from {ranks_in_words(ranks)}; only the other ranks are compared."


def conclusion_line(verdict: Verdict, share: float, hosts: Hosts) -> str:
    """Return the line that sums up the run."""
    if verdict.rank is None:
        return f"StragglerMonitor: no rank stands out; the ranks waited for each other in {share:.0%} of the time."
    return f"StragglerMonitor: {_sentence(verdict, hosts)}"


def report(tracker: StragglerTracker, hosts: Hosts, missing: Iterable[int] = ()) -> str:
    """Return the table of ranks and the conclusion."""
    total = tracker.total
    lines = []
    if any(one.times for one in tracker.ranks()):
        lines += [_table(tracker.ranks(), hosts)]
    if missing:
        lines += [missing_line(missing)]
    if not total.steps:
        lines += [
            "StragglerMonitor: the ranks could not be compared: no collectives were recorded for the steps that"
            " were measured. Expected: more than two steps, a process group of gloo, nccl or mpi4py, and a flight"
            " recorder that is not switched off (TORCH_FR_BUFFER_SIZE must not be 0)."
        ]
    else:
        lines += [conclusion_line(tracker.conclusion(), total.share, hosts)]
    return "\n".join(lines)


def figures(window: Window) -> dict[str, float]:
    """Return what the loggers get of a window."""
    losses, verdict = window.losses, window.verdict
    steps = max(losses.steps, 1)
    return {
        "straggler/rank": float(-1 if verdict.rank is None else verdict.rank),
        "straggler/lost_share": losses.share,
        "straggler/lost_seconds": sum(losses.lost) / steps,
        "straggler/step_seconds": losses.seconds / steps,
    }


def _sentence(verdict: Verdict, hosts: Hosts) -> str:
    assert verdict.rank is not None
    named, share = _named(verdict.rank, hosts), f"{verdict.share:.0%}"
    lost, step = verdict.lost * 1000, verdict.step_seconds * 1000
    if verdict.kind == "always":
        return (
            f"{named} is always slow: the others wait {lost:.0f} ms of each {step:.0f} ms step for it ({share}),"
            f" in {verdict.where}."
        )
    each = lost * verdict.steps / max(verdict.slow_steps, 1)
    return (
        f"{named} is slow at times, in about {verdict.slow_steps} of {verdict.steps} steps: the others then wait"
        f" {each:.0f} ms for it ({share} of all the time), in {verdict.where}."
    )


def _named(rank: int, hosts: Hosts) -> str:
    return f"rank {rank} (host {hosts[rank]})" if rank in hosts else f"rank {rank}"


def _table(ranks: Sequence[RankSummary], hosts: Hosts) -> str:
    headings = (
        "rank",
        "host",
        "data loading",
        "forward and backward",
        "callbacks",
        "waiting",
        "was last",
        "share of lost time",
    )
    shown = ranks
    if len(ranks) > _LONGEST_TABLE:
        most = sorted(ranks, key=lambda one: one.share, reverse=True)[:_LONGEST_TABLE]
        shown = sorted(most, key=lambda one: one.rank)
    table = plain_table(headings, [_row(one, hosts) for one in shown])
    title = "StragglerMonitor: medians of a step [ms], how often a rank was last"
    if len(shown) < len(ranks):
        title += f"; the {len(shown)} of {len(ranks)} ranks that the others waited for longest"
    return f"{title}\n{table}"


def _row(one: RankSummary, hosts: Hosts) -> tuple[object, ...]:
    times = [f"{seconds * 1000:.1f}" for seconds in one.times] if one.times else ["-"] * 4
    return (one.rank, hosts.get(one.rank, "-"), *times, one.last, f"{one.share:.0%}")
