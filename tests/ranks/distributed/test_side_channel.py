"""Which ranks count as lost: not those that are stopped for a while or hold the GIL, but those stopped for good."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep.distributed import (
    ZeroMQSideChannel,
    current_communicator,
)
from lightning_lockstep.distributed.rendezvous import channel_keys
from tests.harness import run_ranks, run_ranks_raw
from tests.harness.patience import wait_until


def open_with(**options: Any) -> ZeroMQSideChannel:
    """A channel beside that of the communicator, with other limits."""
    communicator = current_communicator()
    keys, given = channel_keys("of this test"), {"host": "127.0.0.1", **options}
    address = None
    if communicator.is_main:
        channel = ZeroMQSideChannel(0, communicator.world_size, keys=keys, **given)
        address = channel.address
    address = communicator.broadcast(address)
    if not communicator.is_main:
        rank, world_size = communicator.rank, communicator.world_size
        channel = ZeroMQSideChannel(rank, world_size, keys=keys, main_address=address, **given)
        assert channel.wait_for(lambda: channel.answers(0), 20)
    communicator.barrier()
    return channel


def stopped_for_a_while(frozen: int) -> list[int]:
    """One rank is stopped; another process lets it go on. What the others notice, none of it that it was lost."""
    communicator = current_communicator()
    channel = open_with(silence_limit=10.0)
    noticed: list[int] = []
    heard = threading.Event()
    channel.watch_peers(noticed.append)
    channel.on("awake", lambda message: (channel.rank or channel.post("awake"), heard.set()))
    communicator.barrier()
    if communicator.rank == frozen:
        goes_on = subprocess.Popen(["sh", "-c", f"sleep 1.2; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        goes_on.wait()
        channel.post("awake", to=0 if channel.rank else None)
    else:
        assert heard.wait(20)
    communicator.barrier()  # a channel that is closed without waiting may leave before its goodbye
    channel.close(0.0)
    return noticed


def holds_the_gil() -> list[int]:
    communicator = current_communicator()
    channel = open_with(silence_limit=0.6)
    noticed: list[int] = []
    channel.watch_peers(noticed.append)
    communicator.barrier()
    if communicator.rank == 1:
        ctypes.PyDLL(None).usleep(2_000_000)  # with the GIL held
    communicator.barrier()
    channel.close()
    return noticed


def silent_for_a_while() -> dict[str, Any]:
    return {"stopped": [stopped_for_a_while(frozen) for frozen in (0, 1)], "gil": holds_the_gil()}


def test_a_rank_that_is_stopped_for_a_while_or_holds_the_gil_is_not_lost() -> None:
    assert run_ranks(3, silent_for_a_while, timeout=90) == [{"stopped": [[], []], "gil": []}] * 3


def stopped_for_good(frozen: int, folder: Path) -> list[int]:
    communicator = current_communicator()
    channel = open_with(silence_limit=1.0)
    noticed: list[int] = []
    channel.watch_peers(noticed.append)
    pids, watchers = communicator.gather(os.getpid()), watchers_of(frozen)
    communicator.barrier()
    if communicator.rank == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    if communicator.rank in watchers:
        assert wait_until(lambda: bool(noticed))
        # Not over the channel: rank 0, by way of which it would go, may be the one that is stopped.
        (folder / str(communicator.rank)).touch()
    assert wait_until(lambda: all((folder / str(watcher)).exists() for watcher in watchers))
    with contextlib.suppress(ProcessLookupError):  # another rank was faster
        os.kill(pids[frozen], signal.SIGKILL)  # nothing else would end it
    channel.close(0.0)
    return noticed[:1]  # the end of the stopped rank is also noticed


def watchers_of(rank: int) -> set[int]:
    """Rank 0 watches all, and all watch rank 0."""
    return {1, 2} if rank == 0 else {0}


@pytest.mark.parametrize("frozen", [0, 2])
def test_a_rank_that_is_stopped_for_good_is_named(frozen: int, tmp_path: Path) -> None:
    outcomes = run_ranks_raw(3, stopped_for_good, frozen, tmp_path)
    for watcher in watchers_of(frozen):
        assert outcomes[watcher].value == [frozen]
