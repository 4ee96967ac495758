"""Sums of sparse tensors over the backend mpi4py, compared with gloo's on real MPI ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.common.distributed.mpi.launch import run_program, why_no


@pytest.fixture(scope="module", params=[("open_mpi", 2), ("open_mpi", 3), ("mpich", 2)], ids=str)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    kind, ranks = request.param
    reason = why_no(kind)
    if reason:
        pytest.skip(reason)
    outcome, found = run_program(kind, ranks, "program_sparse.py", tmp_path_factory.mktemp("sparse"))
    assert outcome.returncode == 0 and len(found) == ranks, outcome.output
    return [found[rank] for rank in range(ranks)]


@pytest.mark.mpi
def test_sums_equal_those_of_gloo(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        wrong, count = one["sums"]
        assert wrong == []
        assert count > 200


@pytest.mark.mpi
def test_sums_run_among_other_operations(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["asynchronous"] == [True, [list(range(len(seen)))], [float(len(seen))] * 3]


@pytest.mark.mpi
def test_an_embedding_trains_under_ddp_as_over_gloo(seen: list[dict[str, Any]]) -> None:
    for one in seen:
        assert one["embedding"] == [True, True, True]


@pytest.mark.mpi
def test_what_cannot_be_reduced_is_refused_on_every_rank(seen: list[dict[str, Any]]) -> None:
    texts = ["given max", "given avg", "torch.bool", "sparse_csr", *["cannot send a torch.sparse_coo"] * 3]
    for one in seen:
        errors, after = one["refused"]
        assert [kind for kind, _ in errors] == ["ValueError"] * len(texts)
        assert all(text in said for text, (_, said) in zip(texts, errors, strict=True))
        assert after == 1


@pytest.mark.mpi
def test_ranks_that_differ_all_get_the_same_error(seen: list[dict[str, Any]]) -> None:
    shape, dtype, dims, dense, reduction = errors = seen[0]["different"][0]
    assert all(one["different"][0][:4] == errors[:4] for one in seen)
    assert [kind for kind, _ in errors[:4]] == ["CollectiveMismatchError"] * 4
    assert "sparse (6,)" in shape[1] and "sparse (5,)" in shape[1]
    assert "float64" in dtype[1]
    assert "1 sparse and 1 dense" in dims[1] and "2 sparse and 0 dense" in dims[1]
    assert "(5,)" in dense[1] and "sparse (5,)" in dense[1]
    assert all(one["different"][0][4][0] == "CollectiveMismatchError" for one in seen)
    assert "given min for a sparse tensor" in reduction[1]
    assert [one["different"][1] for one in seen] == [1] * len(seen)
