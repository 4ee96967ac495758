"""The short way for small all-reduces that the caller waits for: losses, flags, counters.

What is the same each time (the MPI datatype and operation, the number that stands for the call) is looked up by
operation, dtype and shape. All else goes the general way of :mod:`_mpi_engine`; so does the first of each kind.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

from lightning_lockstep.distributed.mpi.group_engine import Call, GroupEngine
from lightning_lockstep.distributed.mpi.operations import plain_reduction
from lightning_lockstep.distributed.mpi.progress import Pause
from lightning_lockstep.distributed.mpi.rank_check import Meaning, call_site
from lightning_lockstep.distributed.mpi.work import FinishedWork

__all__ = ["QuickReductions"]

_DONE = FinishedWork()
_CPU = torch.device("cpu")
_LOOKS = 400


class _Known(NamedTuple):
    name: str
    value: int
    elements: int
    nbytes: int
    datatype: Any
    operation: Any
    meaning: Meaning


class QuickReductions:
    """Small all-reduces of one group.

    Args:
        engine: ProgressThread of the group.
    """

    def __init__(self, engine: GroupEngine) -> None:
        self._engine, self._check, self._comm = engine, engine.check, engine.comm
        self._known: dict[Any, _Known] = {}

    def remember(self, call: Call, op: Any) -> None:
        """Keep what is needed to take the short way the next time.

        Ranks: any rank, alone.
        """
        tensor = call.tensors[0]
        plain = plain_reduction(tensor.dtype, op)
        if plain is None or not self._engine.runtime.anywhere or not tensor.numel():
            return
        if len(self._known) > 1000:
            self._known.clear()
        value = self._check.number_of(call.signature) if self._check is not None else 0
        meaning = Meaning(call.name, str(tensor.dtype).removeprefix("torch."), str(tuple(tensor.shape)), "")
        self._known[op, tensor.dtype, tensor.shape] = _Known(
            call.name, value, tensor.numel(), tensor.nbytes, *plain, meaning
        )

    def run(self, tensors: Any, options: Any) -> FinishedWork | None:
        """Reduce in place the short way, or return ``None`` when that is not possible.

        Ranks: all of the group; each may take the short or the long way, both send the same.
        """
        engine = self._engine
        if options is None or getattr(options, "asyncOp", True) or engine.queued or len(tensors) != 1:
            return None
        tensor = tensors[0]
        known = self._known.get((options.reduceOp.op, tensor.dtype, tensor.shape))
        if known is None or tensor.device != _CPU or not tensor.is_contiguous() or engine.broken is not None:
            return None
        if engine.collected is not None or not engine.lock.acquire(blocking=False):
            return None
        try:
            engine.number += 1
            limit = options.timeout.total_seconds()
            self._reduce(known, tensor, limit if limit > 0 else engine.timeout)
        except BaseException as error:
            raise engine.failed(error, known.name) from error.__cause__
        finally:
            engine.lock.release()
        return _DONE

    def _reduce(self, known: _Known, tensor: Any, timeout: float) -> None:
        if self._check is not None:
            request = self._check.ask(known.value, busy=True)  # polled, as small ones are
            test = request.Test
            for _ in range(_LOOKS):
                if test():
                    break
            else:
                self._wait(request, known, timeout)
            number = self._engine.number
            self._check.judge(number, lambda: known.meaning._replace(site=call_site()))
        memory = MPI.buffer.fromaddress(tensor.data_ptr(), known.nbytes)
        request = self._comm.Iallreduce(
            MPI.IN_PLACE, [memory, known.elements, known.datatype], known.operation
        )
        test = request.Test
        for _ in range(_LOOKS):
            if test():
                return
        self._wait(request, known, timeout)

    def _wait(self, request: Any, known: _Known, timeout: float) -> None:
        pause = Pause(time.monotonic() + timeout)
        while not request.Test():
            if not pause() or self._engine.hopeless():
                raise self._engine.stall(known.name, self._engine.number)(timeout)
