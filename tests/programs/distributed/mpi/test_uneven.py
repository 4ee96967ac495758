"""gather_uneven over the backend mpi4py, on real MPI ranks: the same functions as over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.distributed.mpi.launch import run_program, why_no


@pytest.mark.mpi
def test_gather_uneven_does_over_mpi_what_it_does_over_gloo(tmp_path: Path) -> None:
    reason = why_no("open_mpi")
    if reason:
        pytest.skip(reason)
    outcome, found = run_program("open_mpi", 3, "program_uneven.py", tmp_path)
    assert outcome.returncode == 0 and len(found) == 3, outcome.output
    for rank, seen in found.items():
        assert seen["backend"] == "mpi4py"
        assert seen["unlike values"] == []
        assert seen["gradients"] == [[True] * 5] * 3
        assert seen["gradients of one rank"] == [[7.0] if rank == 0 else None, True]
        assert seen["many tensors"]
        assert seen["mismatch"] == found[0]["mismatch"]
        assert all("CollectiveMismatchError" in text for text in seen["mismatch"])
        told, ranks_after = seen["missed backward"]
        assert "all_to_all_single" in told and "all_reduce(sum)" in told and ranks_after == 3
        assert seen["groups"] == ([True] if rank == 1 else [True, True])
