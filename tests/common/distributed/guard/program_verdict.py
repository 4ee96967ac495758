"""Whether what the ranks of a random program have said is right."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence

from tests.common.distributed.guard.program_expectation import Call, Expected, Guard, calls_of
from tests.common.distributed.guard.program_model import Program
from tests.helpers import RankOutcome

__all__ = ["faults_of", "kind_of"]

_TYPES = {
    "CollectiveMismatchError": "mismatch",
    "CollectiveStallError": "stall",
    "RankFailedError": "failed",
}
_HEADLINE = re.compile(r"ranks disagree on collective #(?P<number>\d+) of group '(?P<group>[^']*)'")
_ROW = re.compile(r"^  +(?P<rank>\d+) +(?P<text>\S.*)$", re.MULTILINE)
_ROOTED = ("broadcast", "gather", "reduce", "scatter")
_OPERATION = re.compile(
    r"(#(?P<number>\d+) )?(?P<name>\w+)(\(\w+\))?( (?:to|from) (?P<root>\d+))?( in '(?P<group>[^']*)')?"
)
# Before the programs, the ranks gather their guards: two collectives of the default group, which torch counts and
# `verify`, which begins after them, does not.
_EARLIER: Mapping[Guard, int] = {"watch": 2, "verify": 0}
_CLOSED = re.compile(r"^\w+Error: .*Connection (closed by peer|reset by peer|was likely closed)")


def faults_of(
    program: Program, wanted: Expected, outcomes: Sequence[RankOutcome], guard: Guard = "watch"
) -> list[str]:
    """Return what is wrong with how the ranks of a program have ended; nothing where all is right."""
    return list(_faults(program, wanted, outcomes, guard))


def kind_of(program: Program, wanted: Expected) -> str:
    """Return under which heading a program counts."""
    if program.divergence is None:
        return "none"
    if program.divergence.rank == 0 and program.divergence.kind == "early":
        return "early (rank 0, with which the side channel ends)"
    note = " (silent)" if "completes" in wanted.ends else " (not recorded)" if wanted.unseen else ""
    return f"{program.divergence.kind}{note}"


def _faults(
    program: Program, wanted: Expected, outcomes: Sequence[RankOutcome], guard: Guard
) -> Iterator[str]:
    kind = program.divergence.kind if program.divergence else None
    said: dict[str, list[int]] = {}
    for outcome in outcomes:
        is_odd_one = outcome.rank == wanted.rank
        if is_odd_one and kind in ("kill", "stop", "raise"):
            yield from _odd_end(kind, outcome)
            continue
        if outcome.killed_by_helper:
            yield f"rank {outcome.rank} hung\n{outcome.stack}"
        elif outcome.returncode == 0:
            if outcome.rank in wanted.unfinished and "completes" not in wanted.ends:
                yield f"rank {outcome.rank} finished"
        elif (text := _error(outcome)) is not None:
            said.setdefault(text, []).append(outcome.rank)
        elif outcome.returncode != 1 and not (wanted.unseen and outcome.signal == signal.SIGABRT):
            yield f"rank {outcome.rank} ended with {outcome.returncode}: {outcome.stderr[-2000:]}"
    yield from _said_faults(program, wanted, said, guard)


def _said_faults(
    program: Program, wanted: Expected, said: Mapping[str, list[int]], guard: Guard
) -> Iterator[str]:
    """Return what is wrong with the errors, each of which some ranks have raised."""
    for text, ranks in said.items():
        end = _TYPES.get(text.partition(":")[0])
        if _is_told_of_disagreement(wanted, ranks, text):
            continue
        if _lacks_main(program) and _CLOSED.search(text):
            continue
        if end is None or end not in wanted.ends:
            yield f"ranks {ranks}: expected {wanted.ends}, not {text}"
        elif not wanted.unseen:
            yield from (
                f"ranks {ranks}: {fault} in: {text}" for fault in _text_faults(program, end, text, guard)
            )
    if "completes" not in wanted.ends and not said:
        yield "no rank said anything"
    if len({text for text in said if not text.startswith("RankFailedError")}) > 1 and not _lacks_main(
        program
    ):
        yield "ranks said different things"


def _lacks_main(program: Program) -> bool:
    """Return whether rank 0, which asks the others, is gone or frozen: each rank raises its backend's error then."""
    one = program.divergence
    return one is not None and one.rank == 0 and one.kind in ("early", "stop")


def _is_told_of_disagreement(wanted: Expected, ranks: Sequence[int], text: str) -> bool:
    """Return whether ranks that had nothing to compare have heard of those that disagree."""
    alone = not set(ranks) & set(wanted.disagree)
    return bool(wanted.disagree) and alone and "RankFailedError" in text and "CollectiveMismatchError" in text


def _odd_end(kind: str, outcome: RankOutcome) -> Iterator[str]:
    """What the rank that dies, stops or raises must have done."""
    if kind == "kill" and outcome.signal != signal.SIGKILL:
        yield f"the killed rank ended with {outcome.returncode}"
    if kind == "stop" and not outcome.killed_by_helper:
        yield f"the stopped rank ended with {outcome.returncode}"
    if kind == "raise" and not (outcome.exception or "").startswith("UserError"):
        yield f"the rank that raises said {outcome.exception}"


def _error(outcome: RankOutcome) -> str | None:
    """Return what a rank has raised or, where it was ended by force, printed."""
    if outcome.exception is not None:
        return outcome.exception
    diagnosed = r"^lightning_lockstep\.errors\.(Collective\w+Error: .*?)\n\nrank \d+ of "
    found = re.search(diagnosed, outcome.stderr, re.MULTILINE | re.DOTALL)
    if found is not None:
        return found[1].rstrip()
    failed = re.search(r"^lightning-lockstep: (rank \d+ of .*)", outcome.stderr, re.MULTILINE | re.DOTALL)
    return None if failed is None else f"RankFailedError: {failed[1].rstrip()}"


def _text_faults(program: Program, end: str, text: str, guard: Guard) -> Iterator[str]:
    one = program.divergence
    assert one is not None
    if end == "failed":
        # With rank 0 gone, a rank may hear of the error from the first that has raised it.
        names = (
            f"RankFailedError: rank {one.rank} of {program.world_size}",
            f"Error: rank {one.rank} never came",
        )
        if not text.startswith(names[0]) and not (one.rank == 0 and names[1] in text):
            yield f"rank {one.rank} is not named"
        return
    table = text.partition("\n\n")[2].partition("\n\n")[0]
    rows = {int(row["rank"]): row["text"] for row in _ROW.finditer(table)}
    mark = "<- differs" if end == "mismatch" else "<- never came"
    marked = [rank for rank, row in rows.items() if row.rstrip().endswith(mark)]
    if one.rank not in rows:
        yield f"rank {one.rank} is not named"
    if end == "stall":
        if marked != [one.rank]:
            yield f"rank {one.rank} is not the one that never came"
        return
    headline = _HEADLINE.search(text)
    # A rank that has gone on does not tell its root any more, so one of three may be all that is known.
    called = filter(None, map(_OPERATION.match, rows.values()))
    unsure = any(call["root"] is None and call["name"] in _ROOTED for call in called)
    if headline is not None and len(rows) > 2 and marked != [one.rank] and not unsure:
        yield f"rank {one.rank} is not the one that differs"
    for rank, row in rows.items():
        yield from _row_faults(program, guard, rank, row, headline)


def _row_faults(
    program: Program, guard: Guard, rank: int, row: str, headline: re.Match[str] | None
) -> Iterator[str]:
    """Return what is wrong with what a row says of the call of a rank."""
    found = _OPERATION.match(row)
    assert found is not None
    number = found["number"] or (headline and headline["number"])
    title = found["group"] or (headline and headline["group"])
    if not number or not title:  # all have the same number, in different groups, which tells little
        return
    group = _group(program, title)
    calls = calls_of(program, rank, group, guard)
    index = int(number) - 1 - (0 if group else _EARLIER[guard])
    if index not in range(len(calls)):
        yield f"rank {rank} has no call #{number} of {title!r}"
        return
    call = calls[index]
    if found["name"] != call.operation or not _tells(row, call, guard):
        yield f"rank {rank} called {call}"
    if found["root"] is not None and int(found["root"]) != call.root:
        yield f"the root of rank {rank} is {call.root}"


def _tells(row: str, call: Call, guard: Guard) -> bool:
    if call.operation == "scatter" and guard == "watch":  # what is not a root records no tensors
        return True
    # Sizes of an all-to-all are not compared; of a reduce-scatter the row shows what a rank gets.
    if call.operation in ("all_to_all_single", "reduce_scatter_tensor"):
        return call.dtype in row
    return call.dtype in row and (not call.dtype or str(call.shape) in row)


def _group(program: Program, title: str) -> int:
    listed = re.search(r"\(ranks ([\d, ]+)\)", title)
    ranks = program.groups[0] if listed is None else tuple(map(int, listed[1].split(",")))
    return program.groups.index(ranks)
