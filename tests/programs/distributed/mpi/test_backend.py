"""The backend mpi4py against gloo and against what torch.distributed promises, on real MPI ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.common.distributed.mpi.launch import run_program, why_no


def needs(kind: str) -> None:
    reason = why_no(kind)
    if reason:
        pytest.skip(reason)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "ranks", "arguments"),
    [
        ("open_mpi", 2, ()),
        ("open_mpi", 2, ("--cut",)),
        ("open_mpi", 4, ()),
        ("open_mpi", 4, ("--cut",)),
        ("mpich", 2, ()),
    ],
)
def test_every_operation_gives_what_gloo_gives(
    kind: str, ranks: int, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    needs(kind)
    outcome, found = run_program(kind, ranks, "program_operations.py", tmp_path, arguments=arguments)
    assert outcome.returncode == 0 and len(found) == ranks, outcome.output
    for rank, seen in found.items():
        assert seen["wrong"] == [], f"rank {rank}"
    assert found[0]["cases"] > 1000


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["open_mpi", "mpich"])
def test_messages_of_more_elements_than_mpi_can_count(kind: str, tmp_path: Path) -> None:
    needs(kind)
    if psutil.virtual_memory().available < 8 * 2**30:
        pytest.skip("two ranks with 2^31 bytes each, and what MPI copies of them, need 8 GiB")
    outcome, found = run_program(kind, 2, "program_large.py", tmp_path, timeout=300)
    assert outcome.returncode == 0 and len(found) == 2, outcome.output
    for seen in found.values():
        assert seen["sum"] == [3, 6, 9, 12, 15]
        assert seen["max"] == [11, 12, 13, 14, 15]
        assert seen["broadcast"] == [21, 22, 23, 24, 25]
        assert seen["message"] == [41, 42, 43, 44, 45]


@pytest.mark.mpi
@pytest.mark.parametrize("argument", ["", "--destroy", "--no-thread"])
def test_callbacks_under_way_at_the_end_of_the_program_return(argument: str, tmp_path: Path) -> None:
    needs("open_mpi")
    outcome, found = run_program(
        "open_mpi", 2, "program_callbacks.py", tmp_path, arguments=[argument], timeout=60
    )
    assert outcome.returncode == 0 and found == {0: [2.0], 1: [2.0]}, outcome.output


@pytest.fixture(
    scope="module",
    params=[("open_mpi", ""), ("open_mpi", "--funneled"), ("open_mpi", "--serialized"), ("mpich", "")],
    ids=str,
)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    kind, level = request.param
    needs(kind)
    folder = tmp_path_factory.mktemp("behaviour")
    outcome, found = run_program(kind, 2, "program_behaviour.py", folder, arguments=[level] if level else [])
    assert outcome.returncode == 0 and len(found) == 2, outcome.output
    assert found[0]["thread level"] == {"": 3, "--funneled": 1, "--serialized": 2}[level]
    return [found[0], found[1]]


@pytest.mark.mpi
def test_futures_hold_the_tensors(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["future"] == [[2.0] * 3, True, True, [1.0] * 3]


@pytest.mark.mpi
def test_callbacks_of_futures_may_wait_for_other_operations(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["callbacks"] == [5.0, 2.0, 2.0, "RuntimeError", 2.0, [1.0, 1.0]]


@pytest.mark.mpi
def test_many_operations_are_under_way_at_once(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["overlap"] == seen[1]["overlap"] == [1.0 + 2 * i for i in range(10)]
    assert seen[0]["crosswise"] == seen[1]["crosswise"] == [[2.0, 4.0]]
    assert seen[0]["many_groups"] is True


@pytest.mark.mpi
def test_ranks_may_wait_at_different_moments_and_keep_tensors_at_different_places(
    seen: list[dict[str, Any]],
) -> None:
    for rank, one in enumerate(seen):
        assert one["sync_and_async"] == [20.0, 20.0]
        assert one["lying_elsewhere"] == [[[[0.0], [1.0]], [2.0 * rank]]] * 2


@pytest.mark.mpi
def test_messages_keep_to_their_tags_and_come_from_any_rank(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["messages"] == [1, [1.0] * 4]
    assert seen[1]["messages"] == [[1.0, 2.0], [3.0], sum(range(300_000))]
    assert [one["batch"] for one in seen] == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.mpi
def test_a_message_of_another_dtype_is_refused_and_received_all_the_same(seen: list[dict[str, Any]]) -> None:
    error, wide, after = seen[1]["wrong_message"]
    assert error[0] == "CollectiveMismatchError"
    assert (
        "received from rank 0 (tag 0) 3 elements of torch.float32, but expected 3 of torch.int32" in error[1]
    )
    assert "3 elements of a dtype of 2 bytes, but expected 3 of torch.float32" in wide[1]
    assert after == [1.0] * 3


@pytest.mark.mpi
def test_functional_object_and_coalesced_collectives_work(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["functional"] == [[1.0, 1.0], [0.0, 0.0, 1.0, 1.0], [2.0, 2.0]]
        assert one["objects"] == [[0, 1], [1]]
        assert one["coalesced"] == [[1.0] * 3] * 3
        assert one["uneven_gather"] == [[0.0], [1.0, 1.0]]
        assert one["unchecked"] == [[1.0] * 5, 1.0]


@pytest.mark.mpi
@pytest.mark.parametrize("what", ["wrong_dtype", "wrong_operation", "wrong_on_one_rank", "wrong_splits"])
def test_ranks_that_differ_all_get_the_same_error(seen: list[dict[str, Any]], what: str) -> None:
    assert seen[0][what] == seen[1][what]
    kind, text = seen[0][what]
    assert kind == "CollectiveMismatchError"
    assert "ranks disagree on collective #" in text and "<- differs" in text
    assert "program_behaviour.py" in text


@pytest.mark.mpi
def test_after_a_mismatch_the_group_goes_on(seen: list[dict[str, Any]]) -> None:
    error, after = seen[0]["wrong_shape"]
    assert [error, after] == seen[1]["wrong_shape"]
    assert error[0] == "CollectiveMismatchError" and "(2,)" in error[1] and "(3,)" in error[1]
    assert after == [2.0, 2.0]


@pytest.mark.mpi
def test_wrong_arguments_on_every_rank_are_value_errors(seen: list[dict[str, Any]]) -> None:
    texts = [
        "device meta",
        "to_dense",
        "list of 1 tensors",
        "works on bits",
        "must hold 2 parts",
        "one tensor",
        "split sizes",
    ]
    for one in seen:
        assert [kind for kind, _ in one["wrong_everywhere"]] == ["ValueError"] * len(texts)
        assert all(text in said for text, (_, said) in zip(texts, one["wrong_everywhere"], strict=True))


@pytest.mark.mpi
def test_gradients_and_losses_equal_those_of_gloo_bit_for_bit(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["gradients"] == [True, True, 0.0]


@pytest.mark.mpi
def test_a_rank_that_does_not_arrive_is_named_after_the_timeout(seen: list[dict[str, Any]]) -> None:
    first, seconds, second = seen[0]["too_late"]
    assert (
        first[0] == "CollectiveStallError"
        and "timed out after 0.6 s" in first[1]
        and "rank 1 did not arrive" in first[1]
    )
    assert seconds < 30
    assert second[0] == "DistBackendError" and "cannot be used any more" in second[1]
    kinds = [kind for kind, _ in seen[0]["behind_too_late"]]
    by_callers = (
        seen[0]["thread level"] == 3
    )  # else one after another in the progress thread, at their own limits
    assert kinds == ["CollectiveStallError", "DistBackendError" if by_callers else "CollectiveStallError"]
    assert seen[0]["impatient_wait"][0] == "CollectiveStallError"
    kind, text = seen[0]["impatient_barrier"]
    assert kind == "CollectiveStallError" and "timed out after 0.2 s" in text
    kind, text = seen[0]["late_without_check"]
    assert kind == "CollectiveStallError" and "rank 1 did not arrive" in text


@pytest.mark.mpi
def test_large_sums_of_whole_numbers_of_every_kind(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["large_of_every_number"] == [[5]] * 8


@pytest.mark.mpi
def test_an_error_reaches_the_caller_of_backward(seen: list[dict[str, Any]]) -> None:
    kind, text = seen[0]["error_in_backward"]
    assert kind == "RuntimeError" and "timed out after 0.6 s over MPI" in text
