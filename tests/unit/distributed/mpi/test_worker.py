"""The thread that carries out operations of MPI, and what the ranks of a group must be in the MPI job; without MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_lockstep.distributed.mpi.backend import check_ranks
from lightning_lockstep.distributed.mpi.worker import Body, MPIWork, Worker
from lightning_lockstep.errors import LaunchError

pytestmark = pytest.mark.allow_leaks("threads")  # a worker lives as long as its process
LIMIT = timedelta(seconds=3)


def waits(is_complete: Callable[[], bool] = lambda: False) -> Body:
    yield [is_complete]


def fails(*_: Any) -> Any:
    raise KeyboardInterrupt("on purpose")  # as if another rank was interrupted


def test_an_error_of_what_the_worker_asks_or_tells_ends_the_operation_and_not_the_worker() -> None:
    worker = Worker()
    ended = MPIWork("told", waits(lambda: True), [], timeout=60.0, ended=fails)
    worker.submit(ended)
    with pytest.raises(KeyboardInterrupt, match="on purpose"):
        ended.wait(LIMIT)
    worker.check = fails
    asked = MPIWork("asked", waits(), [], timeout=60.0)
    worker.submit(asked)
    with pytest.raises(KeyboardInterrupt, match="on purpose"):
        asked.wait(LIMIT)
    worker.check = lambda: None
    goes_on = MPIWork("goes on", waits(lambda: True), [], timeout=60.0)
    worker.submit(goes_on)
    assert goes_on.wait(LIMIT)


def test_the_time_of_an_operation_begins_with_it_and_not_with_those_before_it() -> None:
    worker, begun = Worker(), time.monotonic()
    works: list[MPIWork] = []
    for seconds in (0.4, 0.8, 1.2):
        over = begun + seconds
        body = waits(lambda over=over: time.monotonic() > over)  # type: ignore[misc]
        works.append(MPIWork("one of three", body, [], timeout=0.6, after=works[-1] if works else None))
        worker.submit(works[-1])
    assert [work.wait(LIMIT) for work in works] == [True] * 3


def test_the_ranks_of_a_group_are_those_of_mpi() -> None:
    runtime: Any = SimpleNamespace(rank=3, size=4, library="MPI 1.0")
    check_ranks(runtime, 1, [1, 3])
    check_ranks(runtime, 0, [3, 0])
    for rank, ranks in ((0, [1, 3]), (1, [1, 3, 5]), (0, [0])):
        with pytest.raises(LaunchError, match=r"not started as one MPI job: .* is rank 3 of 4 in MPI 1\.0"):
            check_ranks(runtime, rank, ranks)
