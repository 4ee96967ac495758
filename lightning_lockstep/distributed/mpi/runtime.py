"""MPI in this process: initialised once, driven by one progress thread, finalised in order.

MPI is initialised by importing ``mpi4py.MPI``. That happens here, in the progress thread, when the first
process group of the backend is made, and never before. Where the MPI library allows calls from any thread
(``MPI_THREAD_MULTIPLE``), callers talk to it directly as well; otherwise every call goes through that thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from lightning_lockstep._text import first_line
from lightning_lockstep.distributed.failure.process_exit import at_exit, flush_everything, leaving_code
from lightning_lockstep.distributed.failure.uncaught import on_uncaught
from lightning_lockstep.distributed.mpi.progress import ProgressThread, set_listener
from lightning_lockstep.distributed.side_channel.opening import close_side_channel
from lightning_lockstep.errors import LaunchError, MissingExtraError

__all__ = ["MPIRuntime", "abort_when_leaving", "start_runtime"]

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
        """Return whether an operation may block in MPI: one at a time may, whatever its group.

        In the progress thread. ``owner`` is the operation, alone until :meth:`blocks_no_more`.
        """
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
            # MPI asks this host's daemon to end the job, and waits for ever if that is frozen or has just died.
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115 - stays open until the end
            faulthandler.dump_traceback_later(_ABORTED, exit=True, file=self._nowhere)
            self.MPI.COMM_WORLD.Abort(self.failed)
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
_ABORTED = 10.0  # MPI_Abort has ended this process within this time, or it ends itself [s]

_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


def start_runtime() -> MPIRuntime:
    """Return MPI as this process has it, brought up when first asked for: then all ranks do so together."""
    global _runtime
    with _lock:
        if _runtime is None:
            _runtime = MPIRuntime()
            at_exit(_at_exit)
            on_uncaught(_abort_at_exit)
        return _runtime


def abort_when_leaving(delay: float) -> None:
    """Set how long this rank waits after a failure before it ends the MPI job by ``MPI_Abort`` [s].

    In that time the rank that prints the report does so; on that rank it is 0.
    """
    global _delay
    _delay = delay


_delay = 0.0


def _at_exit() -> None:
    if _runtime is None:
        return
    if _runtime.failed is None:
        _runtime.failed = leaving_code()
    if _runtime.failed is not None:
        flush_everything()
        close_side_channel(_OTHERS_RAISE)
        time.sleep(_delay)  # mpirun ends this process meanwhile, once the rank that reports has exited
    _runtime.end()


def _abort_at_exit() -> None:
    """An exception that nobody catches on one rank must not leave the others waiting in MPI."""
    if _runtime is not None:
        _runtime.failed = _runtime.failed or 1


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
