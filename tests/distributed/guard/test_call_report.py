"""What a rank called is plain data, and the report names who differs and what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from typing import Any

import pytest

from lightning_lockstep.distributed.guard.records import (
    CollectiveCall,
    call_site,
    compares_calls,
    fingerprint,
    mismatch_report,
)


def call(rank: int, **changes: Any) -> CollectiveCall:
    usual: dict[str, Any] = {
        "dtypes": ("float32",),
        "shapes": ((1, 5),),
        "site": f"train.py:{80 + rank} in step",
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
        "  1     all_gather  float32  (1, 2, 5)  train.py:81 in step  <- differs",
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


def test_the_site_is_the_nearest_caller_outside_of_the_libraries() -> None:
    library = types.ModuleType("torch.nn.anything")
    exec("def call(function): return function()", library.__dict__)
    assert library.call(call_site).endswith(f"in {sys._getframe().f_code.co_name}")
    assert call_site().startswith("test_call_report.py:")


def test_a_group_whose_backend_compares_says_so() -> None:
    assert compares_calls(types.SimpleNamespace(compares_calls=True))
    assert not compares_calls(types.SimpleNamespace(compares_calls=False))
    assert not compares_calls(object())
