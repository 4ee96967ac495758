"""The backend ``mpi4py``: MPI collectives for an ordinary build of torch.

    from lightning_lockstep.distributed import register_mpi_backend
    register_mpi_backend()
    torch.distributed.init_process_group("mpi4py", rank=..., world_size=..., store=...)

What its operations do with MPI is in :mod:`operations`, how they are carried out in :mod:`worker`. mpi4py is imported
when the ranks meet over MPI or the first group is made, not before.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

import torch.distributed as dist

from lightning_lockstep._text import first_line, install_command
from lightning_lockstep.distributed.failure.process_exit import exit_plan, flush_everything
from lightning_lockstep.distributed.guard.rank_state import WORLD, group_title
from lightning_lockstep.distributed.mpi.worker import Body, MPIWork, Worker, wait_for_callbacks
from lightning_lockstep.distributed.process_group import host_rendezvous
from lightning_lockstep.distributed.rendezvous import addresses_here, interface_towards
from lightning_lockstep.distributed.side_channel.opening import close_side_channel
from lightning_lockstep.errors import LaunchError, MissingExtraError

NAME = "mpi4py"


def register_mpi_backend() -> None:
    """Make the backend ``mpi4py`` known to torch.distributed; calling it again does nothing.

    Ranks: any rank, alone; mpi4py is not imported.
    """
    if not dist.is_backend_available(NAME):
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        # Torch 2.15 attaches its flight recorder to every other backend, which fails for one written in Python.
        recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)


def _create(given: Any, options: Any = None) -> dist.ProcessGroup:
    """Make a group; torch calls it on every rank of the group."""
    runtime = start_runtime()
    from lightning_lockstep.distributed.mpi.process_group import MPIProcessGroup

    rank, size, name = given.group_rank, given.group_size, str(given.group_id)
    # Torch lists no ranks for the default group.
    ranks = list(given.global_ranks_in_group) or list(range(size))
    check_ranks(runtime, rank, ranks)
    title = group_title(name, ranks) if given.global_ranks_in_group else WORLD
    world, tag = runtime.MPI.COMM_WORLD, zlib.crc32(name.encode()) % 32_000
    # Only members take part, and ranks may make several groups at once: the tag keeps them apart.
    comm = runtime.worker.call(lambda: world.Create_group(world.Get_group().Incl(ranks), tag))
    return MPIProcessGroup(rank, size, runtime.worker, comm, title=title, ranks=ranks, timeout=given.timeout)


def check_ranks(runtime: MPIRuntime, rank: int, ranks: Sequence[int]) -> None:
    """Raise if the members of a group do not have in MPI the numbers that they have in the default group."""
    if runtime.rank != ranks[rank] or max(ranks) >= runtime.size:
        raise LaunchError(
            f"The ranks were not started as one MPI job: rank {ranks[rank]}, one of at least {max(ranks) + 1}, is rank"
            f" {runtime.rank} of {runtime.size} in {runtime.library}. Start all of them with one mpirun or mpiexec, of"
            " the MPI library that mpi4py loads, and do not set their ranks yourself. With `srun`, give --mpi=pmix"
            " (Open MPI) or --mpi=pmi2 (MPICH)."
        )


# -- MPI in this process: started by its worker when first needed, and finalised in order --

# How long the rank that ends the job waits for the others [s], whose programs also deal with the failure.
_OTHERS_RAISE = 2.0
_CALLBACKS = 60.0  # longest wait for callbacks at the end of a program that has not failed [s]
_ABORTED = 10.0  # MPI_Abort has ended this process within this time, or it ends itself [s]


class MPIRuntime:
    """MPI as this process has it: the worker initialises it, uses it and finalises it."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.delay = 0.0  # after a failure, until this rank ends the job by `MPI_Abort` [s]
        self._finalises = "mpi4py.MPI" not in sys.modules
        self.MPI = self.worker.call(_import_mpi)
        world = self.MPI.COMM_WORLD
        self.rank, self.size = self.worker.call(world.Get_rank), self.worker.call(world.Get_size)
        version = self.MPI.Get_library_version().strip("\x00 \n").splitlines()[0]
        self.library = version.split(", package")[0].strip()

    def leave(self) -> None:
        """At the exit of Python: finalise MPI, which waits for the other ranks, or abort the job after a failure."""
        # An exception that nobody catches on one rank must not leave the others waiting in MPI.
        if exit_plan.forced_exit or exit_plan.ends_with_error:
            self._abort((exit_plan.forced_exit and exit_plan.forced_exit.exit_code) or 1)
        wait_for_callbacks(_CALLBACKS)  # C++ ends a process whose callbacks Python stops at its own end
        if self._finalises and not self.MPI.Is_finalized():
            # Finalize holds Python's lock until all ranks are there. Other threads of this one may still have to send
            # what a rank waits for that is not, so they meet before it.
            meeting = MPIWork("exit", self._meet(), [])
            self.worker.submit(meeting)
            with suppress(Exception):  # a failure elsewhere, after which that rank ends MPI
                meeting.wait()
            self.worker.call(self.MPI.Finalize)

    def _abort(self, code: int) -> None:
        flush_everything()
        close_side_channel(_OTHERS_RAISE)
        time.sleep(self.delay)  # mpirun ends this process meanwhile, once the rank that reports has exited
        flush_everything()
        # MPI asks this host's daemon to end the job, and waits forever if that is frozen or has just died.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 - stays open until the end
        faulthandler.dump_traceback_later(_ABORTED, exit=True, file=self._nowhere)
        self.MPI.COMM_WORLD.Abort(code)

    def _meet(self) -> Body:
        yield [self.MPI.COMM_WORLD.Ibarrier().Test]


_runtime: MPIRuntime | None = None
_lock = threading.Lock()


def start_runtime() -> MPIRuntime:
    """Return MPI as this process has it; the first call starts it, which all ranks do together."""
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = MPIRuntime()
            atexit.register(_runtime.leave)
            exit_plan.install_excepthook()
        return _runtime


def follow_failures(check: Callable[[], None], delay: float) -> None:
    """Let operations end with what ``check`` raises, and this rank wait before it aborts the job [s]."""
    # In that time the rank that prints the report does so; on that rank it is 0.
    if _runtime is not None:
        _runtime.worker.check, _runtime.delay = check, delay


def _import_mpi() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise MissingExtraError("mpi4py", extra="mpi", needed_for="Communication over MPI") from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.finalize = False  # we finalise, in the thread that initialised
        # While Open MPI waits for another rank, the backward pass may have the core.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        # Rabenseifner's algorithm: on fewer than four ranks Open MPI would reduce to one rank and send from there.
        os.environ.setdefault("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "3")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py is installed, but it cannot load an MPI library: {first_line(error)}. Install one with"
            f" `{install_command('mpi')}`, or set MPI4PY_LIBMPI to the path of your cluster's libmpi.so."
        ) from error
    return MPI


# -- How the ranks of an MPI job find each other, without a fixed port and without a list of addresses --
# Rank 0 listens on a port that the system gives it. Over MPI it sends the others that port and all its addresses, and
# each answers which of them it can reach.

_REACH = 3.0  # longest wait for an address to answer [s]


@dataclass(frozen=True)
class MPIRendezvous:
    address: str  # of rank 0, reached by every rank
    port: int
    sharing: int | None = None  # ranks of this node on the same cores, this one included; None: not known


@functools.cache
def agree_on_rendezvous(rank: int, size: int) -> MPIRendezvous:
    """Return where the ranks of this MPI job meet; the first time, all of them call it together."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address and port.isdigit():
        return MPIRendezvous(address, int(port))
    if size == 1:
        return MPIRendezvous("127.0.0.1", host_rendezvous("127.0.0.1"))
    runtime = start_runtime()
    check_ranks(runtime, rank, range(size))
    world, call = runtime.MPI.COMM_WORLD, runtime.worker.call
    host, cores = socket.gethostname(), os.sched_getaffinity(0)
    everyone: list[tuple[str, set[int]]] = call(world.allgather, (host, cores))
    one_host = all(name == host for name, _ in everyone)
    offer = None
    if rank == 0:
        addresses = ["127.0.0.1"] if one_host else _addresses()
        offer = addresses, host_rendezvous(addresses[0], everywhere=len(addresses) > 1)
    addresses, port = call(world.bcast, offer)
    reached = [address for address in addresses if one_host or rank == 0 or _reaches(address, port)]
    by_all = set.intersection(*map(set, call(world.allgather, reached)))
    address = next((address for address in addresses if address in by_all), None)
    if address is None:
        raise LaunchError(
            f"Rank 0 runs on {everyone[0][0]} and listens on port {port} at {', '.join(addresses)}, but none of these"
            " addresses can be reached from every rank. Let the hosts of the job reach each other on all ports above"
            " 1024, or set MASTER_ADDR and MASTER_PORT to an address and a port that they can reach."
        )
    if not one_host and (interface := interface_towards(address)):
        # By default gloo takes the interface to which the name of its host resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return MPIRendezvous(address, port, sum(name == host and bool(own & cores) for name, own in everyone))


def _addresses() -> list[str]:
    """Return the addresses of this host that others may reach, those of IPv4 first."""
    usable = [one for one in map(ip_address, addresses_here()) if not (one.is_loopback or one.is_link_local)]
    return [str(one) for one in sorted(usable, key=lambda one: one.version)] or ["127.0.0.1"]


def _reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_REACH):
            return True
    except OSError:
        return False
