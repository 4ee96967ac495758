"""What fails on one rank is raised on all, with the rank and the host that it has failed on."""

from __future__ import annotations

import socket

import pytest

from lightning_lockstep.deepspeed.engine import agreed
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.errors import ConfigurationError
from tests.helpers import run_ranks


def outcome(failing: tuple[int, ...]) -> str:
    communicator = current_communicator()

    def work() -> str:
        if communicator.rank in failing:
            raise ConfigurationError(["no compiler", "no library"])
        return f"result of rank {communicator.rank}"

    try:
        return agreed(communicator, work)
    except ConfigurationError as error:
        return "; ".join(error.faults)


def outcomes() -> list[str]:
    return [outcome(failing) for failing in ((), (1,), (0, 1))]


def test_all_ranks_raise_the_same() -> None:
    first, second = run_ranks(2, outcomes, timeout=60)
    assert [first.pop(0), second.pop(0)] == ["result of rank 0", "result of rank 1"]
    assert first == second
    assert first == [f"rank 1 on {socket.gethostname()}: no compiler no library", "no compiler; no library"]


def test_one_process_has_its_own_faults() -> None:
    def work() -> None:
        raise ConfigurationError("no compiler")

    with pytest.raises(ConfigurationError, match=r"^no compiler$"):
        agreed(Communicator(), work)
