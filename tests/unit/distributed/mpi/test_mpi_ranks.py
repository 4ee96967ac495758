"""What the ranks of a group must be in the MPI job; no MPI needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep.distributed.mpi.backend import check_ranks
from lightning_lockstep.errors import LaunchError


def test_the_ranks_of_a_group_are_those_of_mpi() -> None:
    runtime: Any = SimpleNamespace(rank=3, size=4, library="MPI 1.0")
    check_ranks(runtime, 1, [1, 3])
    check_ranks(runtime, 0, [3, 0])
    for rank, ranks in ((0, [1, 3]), (1, [1, 3, 5]), (0, [0])):
        with pytest.raises(LaunchError, match=r"not started as one MPI job: .* is rank 3 of 4 in MPI 1\.0"):
            check_ranks(runtime, rank, ranks)
