"""What rank 0 prints and logs about slow ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_lockstep._text import plain_table, ranks_in_words
from lightning_lockstep.stragglers.verdict import RankSums, StragglerTracker, Verdict, Window

Hosts = Mapping[int, str]


def change_line(window: Window, hosts: Hosts) -> str:
    """Return the line that says that the others wait for another rank now, or for none any more."""
    now, before = window.verdict, window.before
    if now.rank is None and before.rank is not None:
        named = _named(before.rank, hosts)
        return f"StragglerMonitor: since step {window.since} the others no longer wait for {named}."
    return f"StragglerMonitor: since step {window.since}: {_sentence(now, hosts)}"


def report(tracker: StragglerTracker, hosts: Hosts, missing: Collection[int] = ()) -> str:
    """Return the table of ranks and the conclusion."""
    total, verdict = tracker.total, tracker.conclusion()
    said = "the ranks could not be compared, because they waited in none of the measured steps."
    if total.lost and verdict.rank is None:
        said = f"no rank stands out; the ranks waited for each other in {total.share:.0%} of the time."
    elif total.lost:
        said = _sentence(verdict, hosts)
    lines = [_table(total.ranks, hosts)] if total.steps else []
    if missing:
        lines += [f"StragglerMonitor: no step times came from {ranks_in_words(missing)}, which are left out."]
    return "\n".join([*lines, f"StragglerMonitor: {said}"])


def figures(window: Window) -> dict[str, float]:
    """Return what the loggers get of the last steps."""
    sums, verdict = window.sums, window.verdict
    return {
        "straggler/rank": float(-1 if verdict.rank is None else verdict.rank),
        "straggler/lost_share": sums.share,
        "straggler/lost_seconds": sums.lost / sums.steps,
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


def _table(ranks: list[RankSums], hosts: Hosts) -> str:
    parts = ("data loading", "forward and backward", "callbacks", "waiting")
    headings = ("rank", "host", *parts, "was last", "share of lost time")
    lost = sum(one.lost for one in ranks)
    rows = []
    for rank, one in enumerate(ranks):
        times = [f"{seconds * 1000:.1f}" for seconds in one.mean] if one.mean else ["-"] * 4
        share = f"{one.lost / lost if lost else 0:.0%}"
        rows.append((rank, hosts.get(rank, "-"), *times, one.last, share))
    title = "StragglerMonitor: means of a step [ms], how often a rank was last"
    return f"{title}\n{plain_table(headings, rows)}"
