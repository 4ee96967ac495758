"""What rank 0 prints and logs about stragglers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_lockstep._tables import plain_table
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.stragglers.tracker import RankSummary, StragglerTracker, Window
from lightning_lockstep.stragglers.verdict import Verdict

__all__ = ["change_line", "conclusion_line", "figures", "missing_line", "report"]

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
