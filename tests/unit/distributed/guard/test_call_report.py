"""What a rank called is plain data, and the report names who differs and what to do."""

from __future__ import annotations

from typing import Any

from lightning_lockstep.distributed.guard.collective_call import (
    BACKWARD,
    CollectiveCall,
    mismatch_report,
)


def call(rank: int, **changes: Any) -> CollectiveCall:
    usual: dict[str, Any] = {
        "dtypes": ("float32",),
        "shapes": ((1, 5),),
        "site": "train.py:80 in step",
    }
    return CollectiveCall(**{"operation": "all_gather", "group": "world", "number": 412, **usual, **changes})


def report(*changes: dict[str, Any]) -> list[str]:
    return mismatch_report({rank: call(rank, **change) for rank, change in enumerate(changes)}).splitlines()


def test_ranks_that_are_in_different_batches_are_shown_with_them() -> None:
    calls = [{"batch": f"epoch 0, batch {n}", "where": {"epoch": 0, "batch": n}} for n in (4, 4, 3)]
    lines = report(*calls)
    assert lines[0] == "ranks disagree on the batch of collective #412 of group 'world'"
    assert lines[5].startswith("  2     all_gather") and lines[5].endswith("<- differs")
    assert "Ranks 0-1 are at epoch 0, batch 4; rank 2 is at epoch 0, batch 3." in lines
    assert "as many backward passes" in lines[-1]


def at(*sites: str, last: str = "all_gather") -> str:
    """Return the advice for ranks that called from these places with other shapes, the last one this operation."""
    changes: list[dict[str, Any]] = [{"site": site, "shapes": ((rank,),)} for rank, site in enumerate(sites)]
    changes[-1]["operation"] = last
    return report(*changes)[-1]


def test_the_advice_to_ranks_that_called_from_different_places() -> None:
    line, later = "train.py:8 in step", "train.py:20 in step"
    same = "Call the same collectives with the same arguments in the same order on every rank. Look for an `if`"
    for sites, last in (((line, "backward"), "all_reduce"), ((line, later), "barrier")):
        assert at(*sites, last=last).startswith(same)
    # The two branches of an `if rank == 0`, or a call that a rank has skipped.
    assert at(line, later) == (
        "Make the shapes equal on all ranks before the call, or use lightning_lockstep.gather_uneven(), or look for a"
        " call that only some ranks make."
    )
    # DDP gathers nothing in backward, and what FSDP calls for a layer says so.
    divided = "FSDP has divided the model, so each call of a layer is an all_gather"
    assert at("backward", "backward").startswith(divided)
    assert at(f"{line} (FSDP)", f"{line} (FSDP)").startswith(divided)
    assert divided in report({"site": f"{line} (FSDP)"}, {"site": "backward", "operation": "all_reduce"})[-1]
    reduced: dict[str, Any] = {"operation": "all_reduce", "site": BACKWARD}
    text = report(reduced, reduced | {"shapes": ((2,),)})[-1]
    assert text.startswith("DDP averages gradients in backward, but the ranks have brought different ones")
    assert at(line, "").startswith("Make the shapes equal")  # where one came from is not known
    assert at(line, line).startswith("Make the shapes equal")
