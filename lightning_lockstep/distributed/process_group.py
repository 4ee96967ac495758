"""The default process group: made once, on the store at which the ranks have met."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_lockstep.distributed.rendezvous import rendezvous_store
from lightning_lockstep.errors import LaunchError

__all__ = ["default_backend", "has_backend", "process_group_exists", "start_process_group"]


def process_group_exists() -> bool:
    """Return whether this process belongs to a default process group.

    Ranks: any rank, alone.
    """
    return dist.is_available() and dist.is_initialized()


def default_backend(device: torch.device) -> str:
    """Return the name of the backend that torch uses for a device: ``nccl`` for CUDA, ``gloo`` for CPU.

    Ranks: any rank, alone.
    """
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def has_backend(name: str) -> bool:
    """Return whether this torch was built with the backend ``name``: ``mpi``, ``nccl`` or ``gloo``.

    Ranks: any rank, alone.
    """
    return bool(getattr(dist, f"is_{name}_available")())


def start_process_group(
    backend: str,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout: timedelta,
    device: torch.device,
) -> None:
    """Make the default process group, unless this process has one already.

    Args:
        backend: ``gloo``, ``nccl`` or any other that is registered with torch.
        rank: This rank.
        world_size: Number of ranks.
        address: Host name or address of rank 0.
        port: Port of the rendezvous on it.
        timeout: Longest wait for another rank, now and in each collective.
        device: Device of this rank.

    Raises:
        LaunchError: The ranks did not meet in time.

    Ranks: all, together.
    """
    if process_group_exists():
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    meeting = f"rank {rank} of {world_size} waited at {address}:{port}"
    try:
        store = rendezvous_store(
            rank, world_size, address=address, port=port, timeout=timeout.total_seconds()
        )
        # A restarted torchrun attempt finds the keys of the one before; they must not be taken for its own.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"attempt/{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type != "cpu" else None,
        )
    except dist.DistError as error:
        raise LaunchError(
            f"The ranks did not meet: {meeting} for up to {timeout.total_seconds():.0f} s."
            " Check that every rank was started, that all were given the same address and port, and that the"
            f" network lets them through. What torch said: {str(error).splitlines()[0]}"
        ) from error
