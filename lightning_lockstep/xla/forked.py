"""XLA in ranks that are forked from one process: what is allowed before the fork, and what a rank sets after it."""

from __future__ import annotations

import importlib
import importlib.util
import os

from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.xla.availability import has_devices, has_libtpu, num_tpu_chips

__all__ = ["become_xla_rank", "check_xla_untouched", "num_xla_ranks"]


def check_xla_untouched() -> None:
    """Refuse to fork a process in which torch-xla has its devices: a copy of it could not use them."""
    if has_devices():
        raise LaunchError(
            "XLA was already used in this kernel, so its devices would not work in ranks that are forked from it:"
            " expected no call of torch_xla.device(), no tensor and no model on an XLA device in any cell before."
            " Restart the kernel, make the model on the CPU in a cell, and move it to the device inside the function"
            " that the ranks run."
        )


def num_xla_ranks() -> int | None:
    """Return how many ranks torch-xla has devices for on this host, without initialising it.

    0: XLA runs on the CPU, where any number will do. ``None``: nothing asks for XLA, as torch-xla is not
    installed, or there is neither a TPU nor ``PJRT_DEVICE``.
    """
    if importlib.util.find_spec("torch_xla") is None:
        return None
    given = os.environ.get("PJRT_DEVICE", "").upper()
    if given == "CPU":
        return 0
    if given not in ("", "TPU") or not has_libtpu() or not num_tpu_chips():
        return None
    return int(importlib.import_module("torch_xla._internal.tpu").num_local_processes())


def become_xla_rank(rank: int, world_size: int) -> None:  # of this host
    """Set for torch-xla, before it is used here, which rank this process is.

    On a TPU host this gives the rank its own chip.
    """
    chips = num_xla_ranks()
    if chips is None:
        return
    if chips and world_size not in (1, chips):
        raise ConfigurationError(
            f"num_processes={world_size}: expected 1 or {chips}, one rank per chip of this TPU host."
        )
    os.environ.update(PJRT_LOCAL_PROCESS_RANK=str(rank), PJRT_LOCAL_PROCESS_COUNT=str(world_size))
    if chips and world_size > 1:
        importlib.import_module("torch_xla._internal.tpu").configure_topology(rank, world_size)
