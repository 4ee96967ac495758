"""What a rank called is plain data, and the report names who differs and what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from typing import Any

import lightning
import pytest
import torch

from lightning_lockstep.distributed.guard import collective_call
from lightning_lockstep.distributed.guard.collective_call import (
    BACKWARD,
    CollectiveCall,
    call_site,
    fingerprint,
    mismatch_report,
    nearest_site,
    odd_ones,
)
from lightning_lockstep.distributed.guard.records import compares_calls


def call(rank: int, **changes: Any) -> CollectiveCall:
    usual: dict[str, Any] = {
        "dtypes": ("float32",),
        "shapes": ((1, 5),),
        "site": "train.py:80 in step",
    }
    return CollectiveCall(**{"operation": "all_gather", "group": "world", "number": 412, **usual, **changes})


def report(*changes: dict[str, Any]) -> list[str]:
    return mismatch_report({rank: call(rank, **change) for rank, change in enumerate(changes)}).splitlines()


def test_the_report_is_that_of_the_contract() -> None:
    assert report({}, {"shapes": ((1, 2, 5),)}) == [
        "ranks disagree on collective #412 of group 'world'",
        "",
        "  rank  operation   dtype    shape      called from",
        "  0     all_gather  float32  (1, 5)     train.py:80 in step",
        "  1     all_gather  float32  (1, 2, 5)  train.py:80 in step  <- differs",
        "",
        "Make the shapes equal on all ranks before the call, or use lightning_lockstep.gather_uneven().",
    ]


def test_shapes_that_may_differ_count_by_their_number_of_dimensions() -> None:
    usual: dict[str, Any] = {"operation": "gather_uneven", "number": 0, "uneven": True}
    lines = report(usual, usual | {"shapes": ((7, 2),)}, usual | {"shapes": ((5,),)})
    assert lines[0] == "ranks disagree on a collective of group 'world'"
    assert ["differs" in line for line in lines[3:6]] == [False, False, True]
    assert lines[-1] == "Make the numbers of dimensions equal on all ranks before the call."


def test_rows_that_are_not_as_most_are_marked() -> None:
    lines = report({"dtypes": ("float64",)}, {}, {}, {"operation": "broadcast", "root": 1})
    assert ["differs" in line for line in lines[3:7]] == [True, False, False, True]


def test_a_rank_whose_root_is_not_known_agrees_with_most_of_those_that_tell_theirs() -> None:
    kind: dict[str, Any] = {"operation": "scatter"}
    for roots, odd in (((0, 1, None), (1,)), ((None, 1, 0, 1, None, None), (2,)), ((None, None), ())):
        assert odd_ones({rank: call(rank, **kind, root=root) for rank, root in enumerate(roots)}) == odd
    assert odd_ones({0: call(0), 1: call(1, **kind, root=0), 2: call(2)}) == (1,)


@pytest.mark.parametrize(
    ("change", "cell", "remedy"),
    [
        ({"shapes": ((2,), (2,), (2,))}, "3 x (2,)", "Make the shapes equal on all ranks"),
        ({"shapes": ((1,), (2,))}, "(1,), (2,)", "Make the shapes equal on all ranks"),
        ({"shapes": ((1, 6),), "dtypes": ("bfloat16",)}, "bfloat16", "Make the dtypes and shapes equal"),
        (
            {"operation": "reduce", "reduce_op": "sum", "root": 3},
            "reduce(sum) to 3",
            "Call the same collectives",
        ),
        ({"operation": "broadcast", "root": 0}, "broadcast from 0", "Call the same collectives"),
        ({"reduce_op": "max"}, "all_gather(max)", "Call the same collectives with the same arguments"),
        (
            {"note": "ValueError: no [red]tensor[/red]"},
            "ValueError: no [red]tensor[/red]",
            "Make the arguments",
        ),
    ],
)
def test_the_report_shows_what_differs_and_says_what_to_do(
    change: dict[str, Any], cell: str, remedy: str
) -> None:
    lines = report({}, {}, change)
    assert cell in lines[5] and lines[5].endswith("<- differs")
    assert lines[-1].startswith(remedy)


def test_ranks_that_are_in_different_batches_are_shown_with_them() -> None:
    lines = report(
        {"batch": "epoch 0, batch 4"}, {"batch": "epoch 0, batch 4"}, {"batch": "epoch 0, batch 3"}
    )
    assert lines[0] == "ranks disagree on the batch of collective #412 of group 'world'"
    assert lines[2].split()[:3] == ["rank", "batch", "operation"]
    assert lines[5].startswith("  2     epoch 0, batch 3  all_gather") and lines[5].endswith("<- differs")
    assert "as many backward passes" in lines[-1]


def test_a_rank_that_is_ahead_is_shown_by_its_number() -> None:
    lines = report({}, {"number": 413}, {})
    assert lines[0].startswith("ranks disagree on collective #412 ")
    assert "#412 all_gather" in lines[3] and "#413 all_gather" in lines[4] and "<- differs" in lines[4]


def test_a_call_goes_through_json() -> None:
    given = call(1, shapes=((1, 5), ()), reduce_op="sum", root=2, note="why")
    data = json.loads(json.dumps(given.to_data()))
    assert CollectiveCall.from_data(data | {"of a later release": 1}) == given


def test_fingerprints_are_the_same_in_every_process() -> None:
    signature = ("all_reduce", "sum", (2, 3))
    code = f"from {fingerprint.__module__} import fingerprint; print(fingerprint({signature!r}))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == fingerprint(signature) != fingerprint(("all_reduce", "max", (2, 3)))
    assert 0 <= fingerprint(signature) < 2**63


def at(*sites: str, last: str = "all_gather") -> str:
    """Return the advice for ranks that called from these places with other shapes, the last one this operation."""
    changes: list[dict[str, Any]] = [{"site": site, "shapes": ((rank,),)} for rank, site in enumerate(sites)]
    changes[-1]["operation"] = last
    return report(*changes)[-1].partition(" Every rank")[0].partition(" Where a model")[0]


def test_ranks_that_called_from_different_places_are_told_who_skipped_what() -> None:
    line, later = "train.py:8 in step", "train.py:20 in step"
    skipped = "called all_gather at train.py:8 in step; rank{} skipped it and went on to all_gather"
    assert at(line, "backward").startswith(
        f"Rank 0 {skipped.format(' 1')} in backward, or rank 0 reduced nothing"
    )
    assert at("backward", line, "backward").startswith(f"Rank 1 {skipped.format('s 0,2')} in backward")
    assert at(line, later, last="barrier") == (
        "Rank 0 called all_gather at train.py:8 in step; rank 1 skipped it and went on to barrier at train.py:20 in"
        " step, or comes to it later."
    )
    assert at(line, "train.py:9 in other", last="barrier") == (
        "Rank 0 called all_gather at train.py:8 in step; rank 1 called barrier at train.py:9 in other: a rank has"
        " skipped a call that another one made."
    )
    # The two branches of an `if rank == 0`, or a call that a rank has skipped.
    assert at(line, later) == (
        "Make the shapes equal on all ranks before the call, or use lightning_lockstep.gather_uneven(), or look for a"
        " call that only some ranks make."
    )
    # DDP gathers nothing in backward.
    assert at("backward", "backward").startswith("Where a model is divided (FSDP), each call of a layer")
    reduced: dict[str, Any] = {"operation": "all_reduce", "site": BACKWARD}
    text = report(reduced, reduced | {"shapes": ((2,),)})[-1]
    assert text.startswith("In backward, DistributedDataParallel reduces")
    assert at(line, "").startswith("Make the shapes equal")  # where one came from is not known
    assert at(line, line).startswith("Make the shapes equal")


def test_the_site_is_the_nearest_place_in_the_users_program() -> None:
    folder, torch_file = os.path.dirname(lightning.__file__), torch.distributed.__file__
    inside = (f"{folder}/pytorch/trainer/connectors/result.py", 3, "compute")
    trainer, own = (f"{folder}/pytorch/trainer/trainer.py", 5, "fit"), ("/home/me/train.py", 9, "main")
    engine = (torch.autograd.graph.__file__, 7, "_engine_run_backward")
    function = (torch.autograd.function.__file__, 8, "apply")
    collective = (torch_file, 1, "all_reduce")
    for places, expected in (
        ([collective, own], "train.py:9 in main"),
        ([collective, function, own], "train.py:9 in main"),  # as LightningModule.all_gather calls it
        ([collective, (os.__file__, 2, "walk"), own], "train.py:9 in main"),
        ([collective, engine, own], "backward"),
        ([collective, inside, trainer, own], "result.py:3 in compute"),  # not where trainer.fit is called
        ([collective, inside], "result.py:3 in compute"),
        ([collective], "unknown"),
    ):
        assert nearest_site(places, "unknown") == expected
    assert call_site().startswith("test_call_report.py:")


def test_a_library_that_is_loaded_later_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [("/site/deepspeed/comm.py", 4, "reduce"), ("/home/me/train.py", 9, "main")]
    # Another test may have loaded the real one.
    monkeypatch.setattr(collective_call, "_folders", collective_call._folders.__wrapped__)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    assert nearest_site(places, "unknown") == "comm.py:4 in reduce"
    module = types.ModuleType("deepspeed")
    module.__file__ = "/site/deepspeed/__init__.py"
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    assert nearest_site(places, "unknown") == "train.py:9 in main"


def test_a_group_whose_backend_compares_says_so() -> None:
    assert compares_calls(types.SimpleNamespace(compares_calls=True))
    assert not compares_calls(types.SimpleNamespace(compares_calls=False))
    assert not compares_calls(object())
