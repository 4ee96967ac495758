"""MPI in this process: started and ended, and how the ranks of a job meet."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import os
import socket
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar

import psutil

from lightning_lockstep._text import first_line, plain_table
from lightning_lockstep.distributed.failure.process_exit import (
    at_exit,
    flush_everything,
    outcome,
)
from lightning_lockstep.distributed.mpi.progress import ProgressThread, set_listener, wait_for_futures
from lightning_lockstep.distributed.process_group import host_rendezvous
from lightning_lockstep.distributed.rendezvous import address_towards
from lightning_lockstep.distributed.side_channel.opening import close_side_channel
from lightning_lockstep.errors import LaunchError, MissingExtraError

# -- MPI in this process: initialised once, driven by one progress thread, finalised in order --
# MPI is initialised by importing ``mpi4py.MPI``. That happens here, in the progress thread, when the first
# process group of the backend is made, and never before. Where the MPI library allows calls from any thread
# (``MPI_THREAD_MULTIPLE``), callers talk to it directly as well; otherwise every call goes through that
# thread.

T = TypeVar("T")
_runtime: MPIRuntime | None = None
_lock = threading.Lock()


class MPIRuntime:
    """MPI as this process has it."""

    def __init__(self) -> None:
        self.thread = ProgressThread()
        self.failed: int | None = None  # exit code with which the job shall end by ``MPI_Abort``
        self.exited: dict[int, float] = {}  # ranks in COMM_WORLD that exited before others; since when
        self._blocking: object = None
        ours = "mpi4py.MPI" not in sys.modules
        try:
            self.MPI = self.thread.call(_import_mpi)
        except BaseException:
            self.thread.stop()
            raise
        self._finalises = ours
        self.anywhere = self.MPI.Query_thread() >= self.MPI.THREAD_MULTIPLE  # any thread may call MPI
        if self.MPI.Query_thread() < self.MPI.THREAD_SERIALIZED and not self.thread.call(
            self.MPI.Is_thread_main
        ):
            raise LaunchError(
                "mpi4py was initialised by this program's main thread with the thread level"
                f" {_LEVELS[self.MPI.Query_thread()]}, at which only that thread may use MPI: expected at"
                " least MPI_THREAD_SERIALIZED. Don't import mpi4py.MPI yourself, or leave mpi4py.rc.thread_level at"
                " 'multiple'."
            )
        world = self.MPI.COMM_WORLD
        self.rank, self.size = self.call(world.Get_rank), self.call(world.Get_size)
        self.library = (
            self.MPI.Get_library_version().strip("\x00 \n").splitlines()[0].split(", package")[0].strip()
        )
        self.cuda_aware = _cuda_aware()
        set_listener(self._receive_exits)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call ``function`` where MPI may be called."""
        return function(*args) if self.anywhere else self.thread.call(function, *args)

    def may_block(self, owner: object) -> bool:
        """Return whether an operation may block in MPI: one at a time may, whatever its group."""
        # In the progress thread. ``owner`` is the operation, alone until :meth:`blocks_no_more`.
        self._blocking = self._blocking or owner
        return self._blocking is owner

    def blocks_no_more(self, owner: object) -> None:
        """Let others block, if ``owner`` is the one that may."""
        if self._blocking is owner:
            self._blocking = None

    def end(self) -> None:
        """Finalise MPI, which waits for the other ranks, or abort the job if this process has failed."""
        if self.failed is not None:
            flush_everything()
            # MPI asks this host's daemon to end the job, and waits forever if that is frozen or has just died.
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115 - stays open until the end
            faulthandler.dump_traceback_later(_ABORTED, exit=True, file=self._nowhere)
            self.MPI.COMM_WORLD.Abort(self.failed)
        if not wait_for_futures(_CALLBACKS):  # C++ ends a process whose callbacks Python stops at its own end
            outcome.say_last(
                f"Callbacks of futures of the backend 'mpi4py' have not returned {_CALLBACKS:g} s after the end of"
                " the program, and are cut off: wait for what `then` returns."
            )
        if not self.MPI.Is_finalized():
            self.call(self._finish_together)
            set_listener(None)
            if self._finalises:
                self.thread.call(self.MPI.Finalize)
        self.thread.stop()

    def ranks_of(self, comm: Any) -> list[int]:
        """Return the ranks in ``COMM_WORLD`` of the members of a communicator, in its order."""

        def translate() -> list[int]:
            group = comm.Get_group()
            world = self.MPI.COMM_WORLD.Get_group()
            return list(group.Translate_ranks(list(range(group.size)), world))

        return self.call(translate)

    def exited_for(self, rank: int) -> float:
        """Return how long ago [s] a rank in ``COMM_WORLD`` has exited, as far as this one knows; 0 if not."""
        since = self.exited.get(rank)
        return 0.0 if since is None else time.monotonic() - since

    def _finish_together(self) -> None:
        """Wait for the other ranks to exit too; after a while, send those that have not that this one has."""
        world = self.MPI.COMM_WORLD
        barrier, notices = world.Ibarrier(), None
        began = time.monotonic()
        while not barrier.Test():
            if notices is None and time.monotonic() - began > _TOGETHER:
                others = (rank for rank in range(self.size) if rank != self.rank)
                notices = [world.Isend([b"", 0, self.MPI.BYTE], rank, _EXIT_TAG) for rank in others]
            time.sleep(0.001)

    def _receive_exits(self) -> None:
        world, status = self.MPI.COMM_WORLD, self.MPI.Status()
        while world.Iprobe(self.MPI.ANY_SOURCE, _EXIT_TAG, status):
            world.Recv([bytearray(), 0, self.MPI.BYTE], status.source, _EXIT_TAG)
            self.exited.setdefault(status.source, time.monotonic())


_TOGETHER = 2.0  # ranks that exit within this time of each other send no notices [s]
_EXIT_TAG = 31_007  # of the message that a rank has exited
# How long the rank that ends the job waits for the others [s], whose programs deal with the failure, too.
_OTHERS_RAISE = 2.0
_CALLBACKS = 60.0  # longest wait for callbacks at the end of a program that has not failed [s]
_ABORTED = 10.0  # MPI_Abort has ended this process within this time, or it ends itself [s]

_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


def start_runtime() -> MPIRuntime:
    """Return MPI as this process has it, brought up when first asked for: then all ranks do so together."""
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = MPIRuntime()
            at_exit(_at_exit)
            outcome.install_excepthook()
        return _runtime


def abort_when_leaving(delay: float) -> None:
    """Set how long this rank waits after a failure before it ends the MPI job by ``MPI_Abort`` [s]."""
    # In that time the rank that prints the report does so; on that rank it is 0.
    global _delay
    _delay = delay


_delay = 0.0


def _at_exit() -> None:
    if _runtime is None:
        return
    if _runtime.failed is None:
        # An exception that nobody catches on one rank must not leave the others waiting in MPI.
        _runtime.failed = outcome.forced_exit_code or (1 if outcome.ends_with_error else None)
    if _runtime.failed is not None:
        flush_everything()
        close_side_channel(_OTHERS_RAISE)
        time.sleep(_delay)  # mpirun ends this process meanwhile, once the rank that reports has exited
    _runtime.end()


def _import_mpi() -> Any:
    try:
        import mpi4py
    except ImportError as error:
        raise MissingExtraError("mpi4py", extra="mpi", needed_for="The backend 'mpi4py'") from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.finalize = False  # we finalise, in the thread that initialised
        # While Open MPI waits for another rank, the backward pass may have the core.
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py is installed, but it cannot load an MPI library: {first_line(error)}."
            f" Install one with"
            " `pip install 'lightning-lockstep[mpi]'`, or set MPI4PY_LIBMPI to the path of your cluster's"
            " libmpi.so."
        ) from error
    return MPI


def _cuda_aware() -> bool:
    """Return whether the loaded MPI library takes pointers to CUDA memory."""
    for name in ("libmpi.so.40", "libmpi.so.12", "libmpi.so"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 4) | ctypes.RTLD_GLOBAL)
            return bool(library.MPIX_Query_cuda_support())
    return False


# -- How the ranks of an MPI job find each other, without a fixed port and without a list of addresses --
# Rank 0 listens on a port that the system gives it. Over MPI it sends the others that port and all its
# addresses, and each answers which of them it can reach.

_REACH = 3.0  # longest wait for an address to answer [s]


@dataclass(frozen=True)
class MPIRendezvous:
    """Where the ranks meet."""

    address: str  # of rank 0, reached by every rank
    port: int
    hosts: tuple[str, ...] = ()  # host name of each rank
    sharing: int | None = None  # ranks of this node on the same cores, this one included; None: not known
    place: int = 0  # index of this rank among those


@dataclass(frozen=True)
class RankIdentity:
    """What one rank sends of itself to the others when they meet."""

    rank: int  # from environment variables
    mpi_rank: int  # in ``COMM_WORLD``
    size: int  # from environment variables
    local_rank: int
    local_size: int
    host: str
    cores: tuple[int, ...]  # that it may use


_agreed: MPIRendezvous | None = None


def agree_on_rendezvous(
    *, rank: int, size: int, local_rank: int, local_size: int, started_by: str
) -> MPIRendezvous:
    """Return where the ranks of this MPI job meet; the first time, all of them call it together."""
    global _agreed
    if _agreed is None:
        given = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if given[0] and given[1].isdigit():
            _agreed = MPIRendezvous(given[0], int(given[1]))
        elif size == 1:
            _agreed = MPIRendezvous("127.0.0.1", host_rendezvous("127.0.0.1"))
        elif importlib.util.find_spec("mpi4py") is None:
            _agreed = _without_mpi(size, local_size)
        else:
            _agreed = _over_mpi(rank, size, local_rank, local_size, started_by)
    return _agreed


def identity_fault(everyone: Sequence[RankIdentity]) -> str | None:
    """Return what is wrong with the ranks of the job, with a table, or ``None``."""
    counts = Counter(one.host for one in everyone)
    if any(one.rank != one.mpi_rank or one.size != len(everyone) for one in everyone):
        what = "The environment variables and MPI disagree about the ranks."
        remedy = "Start them with the mpirun or mpiexec that belongs to the MPI library which mpi4py loads."
    elif len(set(counts.values())) > 1:
        what = "The nodes have different numbers of ranks."
        remedy = "Give every node the same number of slots in the hostfile, or start fewer ranks."
    else:
        return None
    table = plain_table(
        ("rank in MPI", "in variables", "size", "local rank", "ranks of host", "host"),
        [(o.mpi_rank, o.rank, o.size, o.local_rank, counts[o.host], o.host) for o in everyone],
    )
    return f"{what}\n\n{table}\n\n{remedy}"


def _over_mpi(rank: int, size: int, local_rank: int, local_size: int, started_by: str) -> MPIRendezvous:

    runtime = start_runtime()
    world = runtime.MPI.COMM_WORLD
    if runtime.size != size:
        table = plain_table(
            ("", "ranks", "this rank"),
            [
                (f"{started_by} (environment)", size, rank),
                (f"{runtime.library} (COMM_WORLD)", runtime.size, runtime.rank),
            ],
        )
        raise LaunchError(
            f"The environment variables and MPI disagree about the number of ranks:\n\n{table}\n\n"
            "The ranks were started by a launcher of another MPI than the one mpi4py loads, so each is alone."
            " Use the mpirun of that MPI (for the wheels: the one next to this Python), set MPI4PY_LIBMPI to"
            " the libmpi.so of your launcher, or give `srun` --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)."
        )
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    mine = RankIdentity(rank, runtime.rank, size, local_rank, local_size, socket.gethostname(), cores)
    everyone: list[RankIdentity] = runtime.call(world.allgather, mine)
    fault = identity_fault(everyone)
    if fault:
        raise LaunchError(fault)
    one_host = len({one.host for one in everyone}) == 1
    offer = None
    if rank == 0:
        addresses = ["127.0.0.1"] if one_host else _addresses()
        offer = addresses, host_rendezvous(addresses[0], everywhere=len(addresses) > 1)
    addresses, port = runtime.call(world.bcast, offer)
    reached = [address for address in addresses if one_host or rank == 0 or _reaches(address, port)]
    by_all = set.intersection(*map(set, runtime.call(world.allgather, reached)))
    address = next((address for address in addresses if address in by_all), None)
    if address is None:
        raise LaunchError(
            f"Rank 0 runs on {everyone[0].host} and listens on port {port} at {', '.join(addresses)}, but no"
            " address of these can be reached from every rank. Let the hosts of the job reach each other on"
            " all ports above 1024, or set MASTER_ADDR and MASTER_PORT to an address and a port that they can"
            " reach."
        )
    if not one_host:
        _choose_gloo_interface(address)
    together = [one.rank for one in everyone if one.host == mine.host and set(one.cores) & set(cores)]
    hosts = tuple(one.host for one in everyone)
    return MPIRendezvous(address, port, hosts, len(together), together.index(rank) if rank in together else 0)


def _without_mpi(size: int, local_size: int) -> MPIRendezvous:
    """Return a port that every rank computes from the name of the job; on one node only."""
    job = next((os.environ[name] for name in _JOB_NAMES if os.environ.get(name)), None)
    if local_size != size or job is None:
        raise LaunchError(
            f"{size} ranks were started, of which {local_size} on this node, but mpi4py is not installed, over"
            " which they would find each other. Install it with `pip install 'lightning-lockstep[mpi]'`, or"
            " set MASTER_ADDR and MASTER_PORT to the host of rank 0 and a free port on it."
        )
    return MPIRendezvous("127.0.0.1", 20_000 + zlib.crc32(job.encode()) % 12_000)


_JOB_NAMES = ("PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")


def _addresses() -> list[str]:
    """Return the addresses of this host that others may reach, those of IPv4 first."""
    status = psutil.net_if_stats()
    found = [
        ip_address(address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6) and status[name].isup
    ]
    usable = [one for one in found if not (one.is_loopback or one.is_link_local)]
    return [str(one) for one in sorted(usable, key=lambda one: one.version)] or ["127.0.0.1"]


def _reaches(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_REACH):
            return True
    except OSError:
        return False


def _choose_gloo_interface(address: str) -> None:
    """Give gloo the interface that leads to rank 0; by default it takes the one its host name resolves to."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    own = address_towards(address)
    own = address if own.startswith("127.") else own
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name
