"""MPI in this process: started by its worker when first needed, and finalised in order."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

from lightning_lockstep._text import first_line
from lightning_lockstep.distributed.failure.process_exit import at_exit, flush_everything, outcome
from lightning_lockstep.distributed.mpi.worker import Body, MPIWork, Worker, wait_for_callbacks
from lightning_lockstep.distributed.side_channel.opening import close_side_channel
from lightning_lockstep.errors import LaunchError, MissingExtraError

_TOGETHER = 2.0  # ranks that exit within this time of each other send no notices [s]
_EXIT_TAG = 31_007  # of the message that a rank has exited
# How long the rank that ends the job waits for the others [s], whose programs deal with the failure, too.
_OTHERS_RAISE = 2.0
_CALLBACKS = 60.0  # longest wait for callbacks at the end of a program that has not failed [s]
_ABORTED = 10.0  # MPI_Abort has ended this process within this time, or it ends itself [s]
_ANY_TIME = 1e9  # [s]


class MPIRuntime:
    """MPI as this process has it: the worker initialises it, uses it and finalises it."""

    def __init__(self) -> None:
        self.worker = Worker()
        self.exited: dict[int, float] = {}  # ranks in COMM_WORLD that exited before others; since when
        self._finalises = "mpi4py.MPI" not in sys.modules
        try:
            self.MPI = self.worker.call(_import_mpi)
            if not self.worker.call(self._may_be_used):
                raise LaunchError(
                    "mpi4py was initialised by this program's main thread with a thread level at which only that thread"
                    " may use MPI: expected at least MPI_THREAD_SERIALIZED. Don't import mpi4py.MPI yourself, or leave"
                    " mpi4py.rc.thread_level at 'multiple'."
                )
        except BaseException:
            self.worker.stop()
            raise
        world = self.MPI.COMM_WORLD
        self.rank, self.size = self.worker.call(world.Get_rank), self.worker.call(world.Get_size)
        version = self.MPI.Get_library_version().strip("\x00 \n").splitlines()[0]
        self.library = version.split(", package")[0].strip()
        self.worker.look = self._receive_exits

    def _may_be_used(self) -> bool:
        return bool(self.MPI.Query_thread() >= self.MPI.THREAD_SERIALIZED or self.MPI.Is_thread_main())

    def ranks_of(self, comm: Any) -> list[int]:
        """Return the ranks in ``COMM_WORLD`` of the members of a communicator, in its order."""
        group, world = comm.Get_group(), self.MPI.COMM_WORLD.Get_group()
        return list(group.Translate_ranks(list(range(group.size)), world))

    def end(self, failed: int | None) -> None:
        """Finalise MPI, which waits for the other ranks, or abort the job if this process has failed."""
        if failed is not None:
            flush_everything()
            # MPI asks this host's daemon to end the job, and waits forever if that is frozen or has just died.
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115 - stays open until the end
            faulthandler.dump_traceback_later(_ABORTED, exit=True, file=self._nowhere)
            self.MPI.COMM_WORLD.Abort(failed)
        if not wait_for_callbacks(
            _CALLBACKS
        ):  # C++ ends a process whose callbacks Python stops at its own end
            outcome.say_last(
                f"Callbacks of futures of the backend 'mpi4py' have not returned {_CALLBACKS:g} s after the end of"
                " the program, and are cut off: wait for what `then` returns."
            )
        if not self.MPI.Is_finalized():
            together = MPIWork(
                "exit",
                self._exit_together(),
                [],
                lane=deque(),
                timeout=_ANY_TIME,
                ended=lambda work: None,
                exited=str,
            )
            self.worker.submit(together)
            with suppress(Exception):  # a failure elsewhere, after which MPI is ended by that rank
                together.wait()
            if self._finalises:
                self.worker.call(self.MPI.Finalize)
        self.worker.stop()

    def _exit_together(self) -> Body:
        """Wait for the other ranks to exit too; after a while, send those that have not that this one has."""
        world, began = self.MPI.COMM_WORLD, time.monotonic()
        barrier = world.Ibarrier()
        yield [lambda: barrier.Test() or time.monotonic() - began > _TOGETHER]
        if not barrier.Test():
            others = [rank for rank in range(self.size) if rank != self.rank]
            notices = [world.Isend([b"", 0, self.MPI.BYTE], rank, _EXIT_TAG) for rank in others]
            yield [notice.Test for notice in notices]
        yield [barrier.Test]

    def _receive_exits(self) -> None:
        world, status = self.MPI.COMM_WORLD, self.MPI.Status()
        while world.Iprobe(self.MPI.ANY_SOURCE, _EXIT_TAG, status):
            world.Recv([bytearray(), 0, self.MPI.BYTE], status.source, _EXIT_TAG)
            self.exited.setdefault(status.source, time.monotonic())


_runtime: MPIRuntime | None = None
_lock = threading.Lock()
_delay = 0.0


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


def _at_exit() -> None:
    if _runtime is None:
        return
    # An exception that nobody catches on one rank must not leave the others waiting in MPI.
    failed = outcome.forced_exit_code or (1 if outcome.ends_with_error else None)
    if failed is not None:
        flush_everything()
        close_side_channel(_OTHERS_RAISE)
        time.sleep(_delay)  # mpirun ends this process meanwhile, once the rank that reports has exited
    _runtime.end(failed)


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
            " Install one with `pip install 'lightning-lockstep[mpi]'`, or set MPI4PY_LIBMPI to the path of your"
            " cluster's libmpi.so."
        ) from error
    return MPI
