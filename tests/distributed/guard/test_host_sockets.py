"""What ranks compare over before a collective: sockets on one host, gloo between hosts; and what ends a wait there."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed.guard import companion as companion_module
from lightning_lockstep.distributed.guard.companion import Companion, end_host_sockets
from tests.helpers import run_ranks, run_ranks_raw


def made(timeout: float = 30.0) -> Companion:
    store = dist.distributed_c10d._get_default_store()
    return Companion(store, dist.get_rank(), dist.get_world_size(), timeout=timeout)


def elsewhere() -> str:
    return f"host of rank {dist.get_rank()}"


def compares(several_hosts: bool) -> list[object]:
    if several_hosts:
        companion_module.host_identity = elsewhere  # type: ignore[assignment]
    companion, rank, size = made(), dist.get_rank(), dist.get_world_size()
    over_sockets: object = companion._sockets is not None
    last = 7 if rank < size - 1 else 8
    rest = -sum(range(size - 1)) if rank == size - 1 else rank
    return [
        over_sockets,
        companion.all_equal(2**62 + 3),
        companion.all_equal(last),
        companion.all_equal(-5, timeout=20.0),
        companion.sum_is_zero(rest),
        companion.sum_is_zero(1),
        companion.exchange(bytes(rank)),
    ]


@pytest.mark.parametrize("several_hosts", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_over_sockets_and_over_gloo(size: int, several_hosts: bool) -> None:
    texts = [bytes(rank) for rank in range(size)]
    expected = [not several_hosts, True, False, True, True, False, texts]
    assert run_ranks(size, compares, several_hosts) == [expected] * size


def test_one_rank_that_cannot_connect_brings_all_to_gloo_and_nothing_is_left() -> None:
    assert run_ranks(2, without_folder) == [[False, True]] * 2


def without_folder() -> list[object]:
    before = set(Path(tempfile.gettempdir()).glob("lockstep-verify-*"))
    if dist.get_rank() == 0:
        tempfile.mkdtemp = no_folder  # type: ignore[assignment]
    companion = made()
    assert set(Path("/tmp").glob("lockstep-verify-*")) <= before
    return [companion._sockets is not None, companion.all_equal(3)]


def no_folder(**options: object) -> str:
    raise OSError("no space left on device")


def waits(case: str) -> str:
    companion = made(timeout=1.0 if case == "late" else 60.0)
    if dist.get_rank() == 1:
        if case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3.0)
        return "left"
    if case == "ended":
        threading.Timer(0.3, end_host_sockets).start()
    try:
        companion.all_equal(1)
    except (ConnectionError, dist.DistNetworkError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("killed", "ConnectionError: Connection closed by peer"),
        ("late", "DistNetworkError: Timed out waiting 1 s for another rank"),
        ("ended", "ConnectionError: Connection closed by peer"),
    ],
)
def test_a_wait_ends_when_the_other_rank_is_gone_is_late_or_the_guard_ends_it(
    case: str, expected: str
) -> None:
    outcomes = run_ranks_raw(2, waits, case, timeout=60)
    assert outcomes[0].value == expected
