"""The ranks of a run as one group: the store at which they meet, torch's process group on it, and who is in it.

The communicator and the side channel know a run by its :class:`RankGroup` alone, which is derived from torch's default
process group, whoever has made that.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore

from lightning_lockstep._settings import HAS_MET, restore_variables
from lightning_lockstep._system import on_ctrl_c
from lightning_lockstep._text import first_line
from lightning_lockstep.distributed.rendezvous import ANY, listening_address
from lightning_lockstep.errors import LaunchError

# -- The group of ranks --


@dataclass(eq=False)
class RankGroup:
    """The ranks of a run and the store where they meet; a group that is made anew equals no earlier one."""

    rank: int
    world_size: int
    store: Store
    communicator: Any = None  # of these ranks, once one is made
    layout: tuple[int, int] | None = None  # ranks of each node, and nodes, if a Trainer has connected them
    options: tuple[float, float] | None = None  # of that Trainer's strategy: timeout and silence limit [s]


_lock = threading.Lock()
_groups: WeakKeyDictionary[dist.ProcessGroup, RankGroup] = WeakKeyDictionary()


def current_group() -> RankGroup | None:
    """Return the group of ranks that this process belongs to now, or ``None``."""
    world = dist.group.WORLD
    if world is None:
        return None
    known = _groups.get(world)  # without the lock: a process may have been forked while it was held
    if known is not None:
        return known
    with _lock:
        # The store of the default group has no public accessor in torch 2.9 to 2.13.
        store = dist.distributed_c10d._get_default_store()
        return _groups.setdefault(world, RankGroup(dist.get_rank(), dist.get_world_size(), store))


def forget_group() -> None:
    """Let the next call of :func:`current_group` make the group anew."""
    _groups.clear()


# -- The store at which ranks meet --

_stores: dict[tuple[str, int], Store] = {}
_made: Counter[tuple[str, int]] = Counter()  # process groups made on each of them
_place_before: dict[str, str | None] = {}  # variables of the place as they were before this package set them
_NAME = "lockstep/name"


def rendezvous_store(
    rank: int,
    world_size: int,
    *,
    address: str | None = None,
    port: int | None = None,
    timeout: float = 300.0,
    name: str | None = None,
) -> Store:
    """Return the store at which all ranks of this job can meet before any process group exists."""
    # There is one for each address, made when first asked for. Rank 0 hosts it, except under torchrun, whose agent
    # does; all others wait up to `timeout` [s] for it to answer. `name`: what only this job's ranks have in common.
    address = address or os.environ.get("MASTER_ADDR")
    port = port or int(os.environ.get("MASTER_PORT", 0))
    if not address or not port:
        raise LaunchError(
            f"Rank {rank} of {world_size} does not know where the ranks meet: MASTER_ADDR is {address!r} and"
            f" MASTER_PORT is {port or None!r}. The program that starts the ranks must set both to the host of"
            " rank 0 and to a free port on it."
        )
    if (address, port) not in _stores:
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        listens_at = listening_address(address) if rank == 0 and not by_agent else None
        try:
            store = _tcp_store(address, port, world_size, listens_at=listens_at, timeout=timeout)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise LaunchError(
                f"Rank 0 cannot listen at {address}:{port}, because another program uses that port, perhaps another"
                " job. Set MASTER_PORT to a free port, the same on all ranks, or leave it out."
            ) from error
        if rank > 0 and name is not None and not by_agent:
            _check_name(store, rank, name, f"{address}:{port}")
        _stores[address, port] = store
    if rank == 0 and name is not None:  # also in a store that it has hosted before (host_rendezvous)
        _stores[address, port].set(_NAME, name)
    return _stores[address, port]


def use_store(address: str, port: int, store: Store) -> None:
    """Let the ranks meet next at this store, in which nothing of earlier meetings is found."""
    _stores[address, port] = store
    _made[address, port] = 0
    # A process group that could not be made has been counted, and torch names the next one by that number.
    dist.distributed_c10d._world.group_count = 0


def _check_name(store: Store, rank: int, name: str, place: str) -> None:
    """Compare the name of this job with the one that rank 0 has left in the store."""
    found = bytes(store.get(_NAME)).decode(errors="replace")
    if found != name:
        raise LaunchError(
            f"Rank {rank} of {name!r} found {found!r} at {place}, the place where it should meet rank 0. Two jobs"
            " were given the same MASTER_ADDR and MASTER_PORT: give each a different port, or leave both out."
        )


def host_rendezvous(address: str, *, everywhere: bool = False) -> int:
    """Listen at ``address`` on a port that the system chooses, and return that port."""
    # Rank 0 calls it before it starts the others. ``everywhere``: on all interfaces, if it is not known which they use.
    store = _tcp_store(address, 0, None, listens_at=ANY if everywhere else listening_address(address))
    _stores[address, store.port] = store
    return int(store.port)


def _tcp_store(
    address: str, port: int, world_size: int | None, *, listens_at: str | None, timeout: float = 300.0
) -> TCPStore:
    descriptor = None
    if listens_at not in (None, ANY):
        family = socket.AF_INET6 if ":" in listens_at else socket.AF_INET
        # If the port is taken, torch finds out itself: another store of this process may have it, and serves both.
        with suppress(OSError):
            listener = socket.create_server((listens_at, port), family=family, backlog=4096)
            port, descriptor = listener.getsockname()[1], listener.detach()
    return TCPStore(
        address,
        port,
        world_size,
        listens_at is not None,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )


def forget_rendezvous() -> None:
    """Drop every store made so far, so that the next job of this process meets anew, and at another place."""
    # Whoever still holds a process group of this job keeps its store alive, and with it all its keys.
    _stores.clear()
    _made.clear()
    restore_variables(_place_before)
    _place_before.clear()


# -- Torch's default process group --


def process_group_exists() -> bool:
    return dist.is_initialized()


def process_groups() -> list[Any]:
    """Return the process groups of torch to which this process belongs."""
    # Torch has no public list of them. A copy: another thread may be making one.
    return list(dist.distributed_c10d._world.pg_map) if process_group_exists() else []


def default_backend(device: torch.device) -> str:
    """Return the name of the backend that torch uses for a device: ``nccl`` for CUDA, ``gloo`` for CPU."""
    # For another type of device it is the backend that was registered for it, or ``gloo`` if none was.
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def has_backend(name: str) -> bool:
    return bool(getattr(dist, f"is_{name}_available")())


def start_process_group(
    backend: str,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout: timedelta,  # longest wait for another rank, now and in each collective
    device: torch.device,
    name: str | None = None,  # as for rendezvous_store
    connect_within: timedelta | None = None,  # if not the timeout: longest wait for another rank now
) -> None:
    """Make the default process group, unless this process has one already."""
    if (existing := current_group()) is not None:
        # The ranks may have to meet anew, and a store whose last owner leaves it is lost to those who have come.
        _stores.setdefault((address, port), existing.store)
        return
    here = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    # In the first process of a node: nothing that it starts is a rank of this job.
    if "LOCAL_RANK" not in os.environ and world_size > 1:
        here[HAS_MET] = str(os.getpid())
    for variable, value in here.items():
        _place_before.setdefault(variable, os.environ.get(variable))
        os.environ[variable] = value
    limit = timeout.total_seconds()
    try:
        store = rendezvous_store(rank, world_size, address=address, port=port, timeout=limit, name=name)
        # A restarted torchrun attempt finds the keys of the one before, and so does a second process group of this
        # job on the same store; they must not be taken for its own.
        attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{_made[address, port]}"
        _made[address, port] += 1
        served = dist.Backend.backend_capability.get(backend, [])
        with on_ctrl_c(signal.SIG_DFL):  # while this waits in C++, Ctrl-C does not reach Python
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"attempt/{attempt}", store),
                rank=rank,
                world_size=world_size,
                timeout=connect_within or timeout,
                device_id=device if device.type != "cpu" and device.type in served else None,
            )
            if connect_within is not None:
                # Torch 2.14 has a public function, and warns of the private one.
                set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
                set_timeout(timeout)
    except dist.DistError as error:
        raise LaunchError(
            f"The ranks did not meet: rank {rank} of {world_size} waited at MASTER_ADDR={address}, MASTER_PORT={port}"
            f" for up to {limit:.0f} s. Check that every rank was started, that all have the same address and port,"
            " that this host knows the address, and that no firewall blocks the port. What torch said:"
            f" {first_line(error)}"
        ) from error


def broadcast_tensors(tensors: Iterable[Tensor], group: Any = None, source: int = 0) -> None:
    """Give tensors, of equal shapes and dtypes on all ranks, the values of one, in place; each is a broadcast."""
    for tensor in tensors:
        own = tensor.detach().contiguous()
        row = own.cpu() if own.device.type == "xla" else own
        if row.numel():
            # They are sent as bytes, because the backend may not know the dtype.
            dist.broadcast(row.view(-1).view(torch.uint8), group=group, group_src=source)
            tensor.detach().copy_(row)
