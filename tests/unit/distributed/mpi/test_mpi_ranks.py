"""How the members of a group find each other in the MPI job; no MPI needed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed.mpi.backend import mpi_ranks
from lightning_lockstep.errors import LaunchError
from tests.helpers.patience import patience


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def asked(
    pool: ThreadPoolExecutor, store: dist.Store, rank: int, ranks: Sequence[int], size: int = 40
) -> Future[list[int]]:
    """Ask as the rank of a group whose rank in MPI is ten more than in the default group."""
    runtime: Any = SimpleNamespace(rank=10 + ranks[rank], size=size, library="MPI 1.0")
    timeout = timedelta(seconds=patience(30))
    return pool.submit(mpi_ranks, runtime, store, rank, ranks, timeout)


def test_groups_of_one_name_do_not_take_each_others_members(pool: ThreadPoolExecutor) -> None:
    store = dist.HashStore()
    first = [asked(pool, store, rank, [0, 1]) for rank in (0, 1)]
    assert [one.result() for one in first] == [[10, 11]] * 2
    early = asked(pool, store, 0, [2, 3])
    store.wait(["mpi/2"], timedelta(seconds=patience(30)))
    assert not early.done()  # waits for rank 3, though rank 1 of a group has written already
    assert asked(pool, store, 1, [2, 3]).result() == early.result() == [12, 13]


def test_ranks_of_several_jobs_are_named_by_their_numbers_in_the_default_group(
    pool: ThreadPoolExecutor,
) -> None:
    store = dist.HashStore()
    asking = [asked(pool, store, 0, [5, 7], size=40), asked(pool, store, 1, [5, 7], size=2)]
    for one in asking:
        with pytest.raises(LaunchError, match=r"(?s)not started as one MPI job.*\b5 .* 40 .*\b7 .* 2 "):
            one.result()
