"""Why a collective does not complete, from what the ranks say of themselves: each way it can end, and its words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_lockstep.distributed.guard.collective_call import CollectiveCall
from lightning_lockstep.distributed.guard.rank_state import (
    DiagnosisRequest,
    Outstanding,
    Position,
    RankState,
    RecordedCall,
    UnresponsiveRank,
)
from lightning_lockstep.distributed.guard.report import Diagnosis, diagnose

PAIR = "1 (ranks 0, 1)"
LONGER = (
    "Look at what keeps it there: every rank must call the same collectives. If it only needs longer, give the strategy"
    " a larger stall_timeout."
)
IN_ORDER = "Call the same collectives with the same arguments in the same order on every rank."


def call(number: int = 1, *, done: bool = False, **changes: Any) -> RecordedCall:
    usual = {"operation": "all_reduce", "group": "world", "dtypes": ("float32",), "shapes": ((4,),)}
    made = CollectiveCall(**{"number": number, "site": f"train.py:{number} in step", **usual, **changes})
    return RecordedCall(call=made, started=float(number), done=done)


def rank(number: int, *calls: RecordedCall, of: int = 2, function: str = "", **changes: Any) -> RankState:
    """Return a rank that waits in those of its calls that are not done."""
    waits = {one.call.group: one.call.number for one in reversed(calls) if not one.done}
    arguments = changes.pop("arguments", {})
    groups = {"world": tuple(range(of)), **changes.pop("groups", {})}
    place = Position("train.py:99 in step", ("train.py:99 in step", "train.py:7 in main"), function, arguments)
    return RankState(
        rank=number,
        groups=groups,
        calls=calls,
        outstanding=tuple(Outstanding(group, waits[group]) for group in waits),
        **{"position": place, **changes},
    )


def verdict(
    *states: RankState,
    silent: Mapping[int, str] | None = None,
    running: tuple[int, ...] = (),
    of: tuple[str, int] | None = ("world", 1),
    asker: int = 0,
    raised: str = "",
    stall_timeout: float = 0.0,
) -> Diagnosis | None:
    wanted = None if of is None else Outstanding(*of)
    request = DiagnosisRequest(rank=asker, outstanding=wanted, seconds=61.0, raised=raised)
    said = {state.rank: state for state in states}
    unresponsive = {
        number: UnresponsiveRank(reason, is_moving=number in running) for number, reason in (silent or {}).items()
    }
    return diagnose(request, said, unresponsive, stall_timeout=stall_timeout)


def lines(found: Diagnosis | None) -> list[str]:
    assert found is not None
    return found.text.splitlines()


# -- no answer -----------------------------------------------------------------------------------------


def test_what_has_completed_meanwhile_needs_no_answer() -> None:
    assert verdict(rank(0, call(done=True)), rank(1, call(done=True))) is None
    assert verdict(rank(0, call(2)), rank(1, call(done=True))) is None
    assert verdict(rank(0), rank(1), of=None) is None


def test_an_error_of_the_backend_that_the_records_do_not_explain_stays_as_it_is() -> None:
    assert verdict(rank(0, call()), rank(1), raised="Connection closed by peer") is None


def test_an_error_of_the_backend_because_a_rank_has_left() -> None:
    request = DiagnosisRequest(rank=0, outstanding=None, seconds=0.0, raised="Connection closed by peer")
    states = {0: rank(0, call(3, done=True), of=3), 1: rank(1, of=3)}
    gone = UnresponsiveRank("its program has ended", has_left=True)
    found = diagnose(request, states, {2: gone})
    assert lines(found)[0] == (
        "rank 2 never came to collective #3 of group 'world' (all_reduce): the program there has ended while"
        " rank 0 waited"
    )
    assert lines(found)[5].endswith("no answer: its program has ended  <- never came")
    assert lines(found)[3].split() == ["0", "all_reduce", "float32", "(4,)", "train.py:3", "in", "step"]
    assert lines(found)[-1].startswith("That program ended earlier than the others: look for a collective")
    assert found is not None and (found.kind, found.ranks) == ("stall", (2,))


# -- what differs --------------------------------------------------------------------------------------


def test_an_open_collective_that_ranks_have_called_differently() -> None:
    found = verdict(rank(0, call(), of=3), rank(1, call(shapes=((5,),)), of=3), rank(2, call(), of=3))
    assert lines(found) == [
        "ranks disagree on collective #1 of group 'world'",
        "",
        "  rank  operation   dtype    shape  called from",
        "  0     all_reduce  float32  (4,)   train.py:1 in step",
        "  1     all_reduce  float32  (5,)   train.py:1 in step  <- differs",
        "  2     all_reduce  float32  (4,)   train.py:1 in step",
        "",
        "Make the shapes equal on all ranks before the call.",
    ]
    assert found is not None and (found.kind, found.ranks) == ("mismatch", (1,))


@pytest.mark.parametrize("operation", ["all_to_all", "all_to_all_single", "alltoall", "scatter"])
def test_shapes_that_ranks_may_choose_are_no_difference(operation: str) -> None:
    kinds = {"operation": operation}
    found = verdict(rank(0, call(**kinds)), rank(1, call(shapes=((9,),), **kinds)))
    assert found is not None and found.kind == "stall"


def test_a_reduction_and_a_root_are_known_of_ranks_that_are_in_the_call() -> None:
    kinds = {"operation": "broadcast"}
    inside = [
        rank(number, call(**kinds), of=3, function="broadcast", arguments={"src": str(root)})
        for number, root in enumerate((0, 1, 0))
    ]
    found = verdict(*inside)
    assert ["broadcast from 0" in line for line in lines(found)[3:6]] == [True, False, True]
    assert ["differs" in line for line in lines(found)[3:6]] == [False, True, False]
    sums = [
        rank(number, call(), function="all_reduce", arguments={"op": op}) for number, op in enumerate(("sum", "max"))
    ]
    assert ["all_reduce(sum)" in line for line in lines(verdict(*sums))[3:5]] == [True, False]


def test_a_difference_in_a_group_that_the_asker_is_not_in() -> None:
    """Rank 2 waits for rank 0, which waits in another group for a call that rank 1 has made differently."""
    zero = rank(0, call(group=PAIR), of=3, groups={PAIR: (0, 1)})
    one = rank(1, call(group=PAIR, operation="barrier", dtypes=(), shapes=()), of=3, groups={PAIR: (0, 1)})
    found = verdict(zero, one, rank(2, call(), of=3), asker=2)
    assert found is not None and found.kind == "mismatch"
    assert lines(found)[0] == f"ranks disagree on collective #1 of group '{PAIR}'"


# -- who does not come ---------------------------------------------------------------------------------


def test_a_rank_that_never_comes_and_does_not_move() -> None:
    found = verdict(rank(0, call(1, done=True), call(2)), rank(1, call(1, done=True)), of=("world", 2))
    assert lines(found) == [
        "rank 1 never came to collective #2 of group 'world' (all_reduce): rank 0 waited 61 s",
        "",
        "  rank  operation   dtype    shape  called from / now at",
        "  0     all_reduce  float32  (4,)   train.py:2 in step",
        "  1     -                           train.py:99 in step, after #1 all_reduce at train.py:1 in step"
        "  <- never came",
        "",
        "    Stack of rank 1 (innermost frame last):",
        "      train.py:99 in step",
        "      train.py:7 in main",
        "",
        LONGER,
    ]
    assert found is not None and (found.kind, found.ranks) == ("stall", (1,))


def test_a_rank_that_does_not_answer() -> None:
    found = verdict(rank(0, call(), of=3), rank(2, call(), of=3), silent={1: "its process 7 is stopped"})
    assert lines(found)[0] == (
        "rank 1 never came to collective #1 of group 'world' (all_reduce): ranks 0,2 waited 61 s"
    )
    assert "no answer: its process 7 is stopped  <- never came" in lines(found)[4]
    assert "Stack of" not in "".join(lines(found))
    assert lines(found)[-1].startswith("Look at each silent process")


def test_a_rank_that_moves_is_slow() -> None:
    found = verdict(rank(0, call()), rank(1, moves=True))
    assert found == Diagnosis(
        kind="slow",
        text=(
            "rank 0 has waited 61 s in collective #1 of group 'world' (all_reduce) at train.py:99 in step for rank 1."
            " rank 1 is still running, at train.py:99 in step. No error is raised while it makes progress."
        ),
        ranks=(1,),
    )


def test_a_rank_that_waits_for_one_that_moves_is_slow_too() -> None:
    """Rank 0 waits for rank 1, which waits in a group of its own for rank 2, which computes."""
    one = rank(1, call(group="2 (ranks 1, 2)"), of=3, groups={"2 (ranks 1, 2)": (1, 2)})
    two = rank(2, of=3, moves=True, groups={"2 (ranks 1, 2)": (1, 2)})
    found = verdict(rank(0, call(), of=3), one, two)
    assert found is not None and (found.kind, found.ranks) == ("slow", (2,))
    still = rank(2, of=3, groups={"2 (ranks 1, 2)": (1, 2)})
    found = verdict(rank(0, call(), of=3), one, still)
    assert found is not None and (found.kind, found.ranks) == ("stall", (2,))


# -- nobody can go on ----------------------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    pair = {PAIR: (0, 1)}
    found = verdict(rank(0, call(7), groups=pair), rank(1, call(3, group=PAIR), groups=pair), of=("world", 7))
    assert found is not None and found.kind == "mismatch"
    assert lines(found)[0] == "ranks disagree on which operation comes next"
    assert "#7 all_reduce in 'world'" in lines(found)[3]
    assert f"#3 all_reduce in '{PAIR}'" in lines(found)[4]
    assert lines(found)[-1].startswith(IN_ORDER)


def test_a_collective_that_all_have_called_alike_and_that_does_not_complete() -> None:
    found = verdict(rank(0, call()), rank(1, call()))
    assert lines(found) == [
        "collective #1 of group 'world' (all_reduce) does not complete, although ranks 0-1 made the same call 61 s ago",
        "",
        "  rank  operation   dtype    shape  called from / now at",
        "  0     all_reduce  float32  (4,)   train.py:1 in step",
        "  1     all_reduce  float32  (4,)   train.py:1 in step",
        "",
        "Look at the network between the hosts (lockstep-doctor network), and at what other threads do. If the"
        " transfer only needs longer, give the strategy a larger stall_timeout.",
    ]
    assert found is not None and (found.kind, found.ranks) == ("stall", ())


# -- what is made of it --------------------------------------------------------------------------------


def test_a_silent_rank_whose_process_computes_is_a_remark() -> None:
    found = verdict(rank(0, call()), silent={1: "its process 7 computes"}, running=(1,))
    assert found is not None and (found.kind, found.ranks) == ("slow", (1,))
    assert "for rank 1. rank 1 cannot say where it is: its process 7 computes. No error is raised" in found.text


def test_a_collective_whose_data_is_still_on_its_way_is_a_remark() -> None:
    found = verdict(rank(0, call()), rank(1, call(), moves=True))
    assert found is not None and (found.kind, found.ranks) == ("slow", ())
    assert "All its ranks have made the same call. No error is raised while data moves" in found.text
    # What differs does so whatever moves.
    found = verdict(rank(0, call()), rank(1, call(operation="barrier"), moves=True))
    assert found is not None and found.kind == "mismatch"
