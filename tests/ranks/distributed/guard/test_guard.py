"""The guard of a run on two ranks: its settings, what it knows of messages, and that data counts as progress."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.distributed.guard.guard import guard_on
from lightning_lockstep.distributed.guard.rank_state import position
from lightning_lockstep.distributed.guard.verify import CallVerifier, MessageRecorder
from lightning_lockstep.distributed.guard.watch import GuardSettings
from lightning_lockstep.errors import ConfigurationError
from tests.helpers import run_ranks


def two_guards() -> tuple[str, list[str]]:
    """Another guard on each rank; then the same, of three kinds one after the other."""
    channel = current_communicator().side_channel
    propagation = propagation_on(channel)
    error = ""
    try:
        guard_on(channel, propagation, GuardSettings(guard="watch" if channel.rank else "verify"))
    except ConfigurationError as raised:
        error = str(raised)
    kinds: list[Any] = ["watch", "verify", "watch", "off"]
    sums = []
    for kind in kinds:
        guard = guard_on(channel, propagation, GuardSettings(guard=kind))
        assert (guard is None) == (kind == "off")
        assert guard_on(channel, propagation, GuardSettings(guard=kind)) is guard
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        sums.append(str(tensor.tolist()))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("lockstep-guard") <= 2, "one that was stopped may still be on its way out"
    return error, sums


def where_receives_wait(recorder: CallVerifier | MessageRecorder) -> list[tuple[str, list[str]]]:
    """What another thread of rank 0 finds of ways to receive while its main thread is in them."""
    recorder.start()
    kind = type(recorder).__name__
    store, found = dist.distributed_c10d._get_default_store(), []
    ways = [
        lambda: dist.irecv(torch.ones(2), 1).wait(),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(2), 1)])[0].wait(),
        lambda: dist.recv(torch.ones(2), 1),
        lambda: dist.recv_object_list([None], 1),
    ]
    for number, receive in enumerate(ways):
        key = f"{kind} looked {number}"
        if dist.get_rank() == 1:
            store.wait([key])
            send = dist.send_object_list if number == 3 else dist.send
            send([1] if number == 3 else torch.ones(2), 0)  # type: ignore[operator]
            continue

        def look(key: str = key) -> None:
            while position(threading.main_thread()).function not in ("wait", "recv"):
                time.sleep(0.01)
            messages = [one.call.title for one in recorder.messages()]
            found.append((position(threading.main_thread()).function, messages))
            store.set(key, "")

        looking = threading.Thread(target=look)
        looking.start()
        receive()  # type: ignore[operator]
        looking.join()
    assert recorder.messages() == []
    recorder.stop()
    return found


def written_by_gloo(count: int) -> float:
    """How much more this process has written, by the counters of its system, once it has reduced so many bytes."""
    if sys.platform != "linux":  # other systems do not count it
        return float(count)
    before = psutil.Process().io_counters().write_chars
    dist.all_reduce(torch.ones(count // 4))
    return float(psutil.Process().io_counters().write_chars - before)


def cases() -> dict[str, Any]:
    return {
        "guards": two_guards(),
        "watch": where_receives_wait(MessageRecorder()),
        "verify": where_receives_wait(CallVerifier()),
        "written": written_by_gloo(4 << 20),
    }


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_ranks(2, cases, timeout=60)


def test_all_ranks_have_the_same_guard_and_may_change_it_between_fits(seen: list[dict[str, Any]]) -> None:
    errors, sums = zip(*(one["guards"] for one in seen), strict=True)
    assert sums[0] == sums[1] == ["[2.0, 2.0]"] * 4
    (told,) = [error for error in errors if error]
    assert "on another rank: expected the same on all" in told and "LOCKSTEP_DEBUG" in told


@pytest.mark.parametrize("guard", ["watch", "verify"])
def test_receives_are_known_while_they_are_waited_for(guard: str, seen: list[dict[str, Any]]) -> None:
    assert seen[0][guard] == [(function, ["recv from 1"]) for function in ("wait", "wait", "recv", "recv")]


def test_data_of_gloo_counts_as_written(seen: list[dict[str, Any]]) -> None:
    assert min(one["written"] for one in seen) > 1 << 20
