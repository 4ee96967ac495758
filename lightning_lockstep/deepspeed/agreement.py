"""Work that each rank does alone, and whose faults are those of all."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeVar

from lightning_lockstep.distributed import Communicator
from lightning_lockstep.errors import ConfigurationError

__all__ = ["agreed"]

_Result = TypeVar("_Result")


def agreed(communicator: Communicator, work: Callable[[], _Result]) -> _Result:
    """Return the result here, or raise on all ranks the ConfigurationError that the work raises on some."""
    result = None
    faults: tuple[str, ...] = ()
    try:
        result = work()
    except ConfigurationError as error:
        faults = error.faults
    failed = communicator.agree(bool(faults), "\n".join((socket.gethostname(), *faults)))
    if not failed:
        return result  # type: ignore[return-value]  # it has returned
    said = {reason.partition("\n")[2] for reason in failed.reasons.values()}
    if len(said) == 1 and len(failed.reasons) == communicator.world_size:
        raise ConfigurationError(faults)
    raise ConfigurationError(
        [
            f"rank {rank} on {host}: {' '.join(lines)}"
            for rank, (host, *lines) in ((rank, text.splitlines()) for rank, text in failed.reasons.items())
        ]
    )
