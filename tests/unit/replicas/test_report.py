"""Who is in the minority, and the reasons: decided by what ranks have told, without ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_lockstep.replicas.checksums import BatchComparison
from lightning_lockstep.replicas.report import Finding, judge, start_table


def answer(**changes: Any) -> dict[str, Any]:
    """What a rank tells of which nothing is wrong."""
    told = {
        "sums": {"parameters": {"w": 1, "b": 2}, "buffers": {}, "optimizer state": {"exp_avg of w": 3}},
        "changed": ["w", "exp_avg of w"],
        "settings": {"optimizer 0, group 0, lr": "0.1"},
        "gradients": {"w": 5, "b": 6},
        "steps": [4],
        "statistics": [],
        "automatic": True,
        "sees_gradients": True,
        "divided": False,
        "wrapped": True,
        "synchronizes": True,
        "padding": False,
        "outside": [],
    }
    for key, value in changes.items():
        told[key] = {**told[key], **value} if isinstance(value, dict) else value
    return told


PLACES = ["vm, cpu"] * 4


def found(*answers: dict[str, Any]) -> Finding:
    """What is found where rank 0 and others agree and the last ranks differ, each from all."""
    finding = judge(10, 5, {**dict(enumerate(answers)), 3: answers[0]}, PLACES, set())
    assert finding is not None
    return finding


OTHER = {"sums": {"parameters": {"w": 9, "b": 2}}}


def test_the_minority_is_named_with_the_tensor() -> None:
    finding = found(answer(), answer(sums={"parameters": {"w": 9, "b": 2}}))
    text = finding.text
    assert finding.names == {"w"} and "In the minority: rank 1." in text
    assert "differ in their parameters, found after batch 10" in text and "equal after batch 5" in text
    assert "ranks 0,3, rank 1 <- differs" in text
    assert "equal after batch 5." in text
    assert text.index("a callback wrote other weights") < text.index("Memory or arithmetic")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gradients": {"w": 8, "b": 8}}, "a forward past DDP"),
        ({"gradients": {"w": 8, "b": 8}, "automatic": False}, "self.manual_backward(loss)"),
        ({"gradients": {"w": 8, "b": 8}, "synchronizes": False}, "no_sync()"),
        ({"gradients": {"w": 8, "b": 8}, "wrapped": False}, "no DistributedDataParallel"),
        ({"gradients": {"w": 8}}, "a hook, or DDP does not know"),
        ({"steps": [3]}, "[3] on rank 1"),
        ({"settings": {"optimizer 0, group 0, lr": "0.2"}}, "lr is 0.1 on ranks 0,3, 0.2 on rank 1"),
    ],
)
def test_the_first_reason_is_the_one_with_evidence(changes: dict[str, Any], reason: str) -> None:
    text = found(answer(), answer(sums=OTHER["sums"], **changes)).text
    assert reason in text.partition("  1. ")[2].splitlines()[0]
    assert "Memory" not in text


def test_a_parameter_that_ddp_does_not_know_is_named() -> None:
    finding = found(answer(outside=["w"]), answer(sums=OTHER["sums"], gradients={"w": 8}, outside=["w"]))
    assert "  1. The gradients of w differed" in finding.text and "DDP does not know w" in finding.text


def test_of_two_ranks_the_one_that_changed_alone_is_named_else_none() -> None:
    finding = judge(10, 5, {0: answer(changed=[]), 1: answer(sums=OTHER["sums"])}, PLACES, set())
    assert finding is not None and "In the minority: rank 1." in finding.text
    assert "changed on some ranks only" in finding.text
    finding = judge(10, 5, {0: answer(), 1: answer(sums=OTHER["sums"])}, PLACES, set())
    assert finding is not None
    assert "No majority agrees, so it is not known which rank is wrong." in finding.text


def test_buffers_that_all_ranks_change_are_their_own_statistics() -> None:
    def of(number: int, before: int, **changes: Any) -> dict[str, Any]:
        sums = {"buffers": {"average": number}, "parameters": {}, "optimizer state": {}}
        return answer(sums=sums, changed=["average"] if number != before else [], **changes)

    each = {rank: of(10 + rank, rank, statistics=["average"]) for rank in range(3)}
    seen: set[str] = set()
    assert judge(10, 5, each, PLACES, seen) is None
    unchanged = {rank: of(10 + rank, 10 + rank, statistics=["average"]) for rank in range(3)}
    assert judge(15, 10, unchanged, PLACES, seen) is None, "as after a validation"
    assert judge(15, 10, unchanged, PLACES, set()) is not None
    shared = {rank: of(10 + rank, rank) for rank in range(3)}
    assert judge(10, 5, shared, PLACES, seen - {"average"}) is not None
    alone = {0: of(1, 1, statistics=["average"]), 1: of(2, 1, statistics=["average"])}
    finding = judge(10, 5, {**alone, 2: alone[0]}, PLACES, set())
    assert finding is not None and "In the minority: rank 1." in finding.text


def test_buffers_may_differ_after_a_padding_batch() -> None:
    behind = answer(sums={"buffers": {"batches": 4}})
    assert "differ in their buffers, found" in found(answer(sums={"buffers": {"batches": 5}}), behind).text
    padded = {0: answer(sums={"buffers": {"batches": 5}}), 1: {**behind, "padding": True}}
    assert judge(10, 5, padded, PLACES, set()) is None


def test_a_tensor_that_a_rank_lacks_differs() -> None:
    finding = found(answer(), answer(sums={"optimizer state": {}}))
    assert finding.names == {"exp_avg of w"} and "differ in their optimizer state, found" in finding.text


def test_the_table_of_the_start_marks_the_minority() -> None:
    facts = {rank: {"precision": "32-true", "parameter 0": "w (4,) float32 trained"} for rank in range(3)}
    facts[2]["precision"] = "16-true"
    table, is_fault = start_table(facts)
    assert is_fault and "parameter 0" not in table
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["precision", "ranks", "0-1", "32-true"],
        ["precision", "rank", "2", "16-true", "<-", "differs"],
    ]
    table, is_fault = start_table({0: {"version of torch": "2.9"}, 1: {"version of torch": "2.10"}})
    assert not is_fault and "differs" not in table


def test_which_ranks_work_on_the_same_batches() -> None:
    def compare(*rows: dict[int, list[int]]) -> list[Any]:
        comparison = BatchComparison()
        return [comparison.compare({rank: [sums] for rank, sums in row.items()}) for row in rows]

    same, other, constant = [1, 2, 3], [4, 5, 6], [7, 7, 7]
    assert compare({0: same, 1: other, 2: same}) == [(0, (0, 2))]
    assert compare({0: constant, 1: constant}) == [None], "alike by nature"
    assert compare({0: [1], 1: [1]}, {0: same, 1: same}) == [None, (0, (0, 1))], "the first that tells something"
    # By chance once, as where samples are drawn with replacement.
    assert compare({0: same, 1: other}, {0: same, 1: same}, {0: same, 1: other}) == [None, None, None]
    assert compare({0: same, 1: other}, {0: same, 1: same}, {0: other, 1: other})[2] == (0, (0, 1))
