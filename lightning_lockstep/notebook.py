"""``notebook_launcher``: several ranks from a cell of a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lightning_lockstep._lightning import find_free_network_port, rank_zero_only
from lightning_lockstep._settings import Faults
from lightning_lockstep._system import usable_cores
from lightning_lockstep._text import say
from lightning_lockstep.launchers.multiprocessing import (
    RanksToStart,
    prepare_fork,
    run_in_ranks,
    show_in_cell,
)
from lightning_lockstep.launchers.rank_supervisor import apply_threads
from lightning_lockstep.xla.runtime import become_xla_rank, check_untouched, num_xla_ranks

__all__ = ["notebook_launcher"]

_MOST_ON_CPU = 8
_Returned = TypeVar("_Returned")


def notebook_launcher(
    function: Callable[..., _Returned],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    *,
    grace_period: float = 10.0,
) -> _Returned:
    """Run ``function(*args)`` in several ranks that are started from this cell, and return what rank 0 returned.

    Inside the function make a ``Trainer(strategy="lockstep_ddp", devices=num_processes)``, or use
    :mod:`torch.distributed`; ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set. The
    ranks are forks of the kernel: what one changes in memory stays in it, so return what the notebook needs.

    Args:
        function: What each rank runs.
        args: Its arguments.
        num_processes: Number of ranks; by default one per GPU, else one per chip of a TPU, else one per usable core,
            at most 8. With 1 the function runs in the kernel itself.
        grace_period: When a rank fails, how long the others may take to end [s]; after half of it they get SIGTERM.

    Returns:
        What the function returned on rank 0, tensors on the CPU; it has to be picklable.

    Raises:
        ConfigurationError: One message with every argument that cannot be used.
        LaunchError: XLA was already used in this kernel.
        RuntimeError: CUDA was.
        RankFailedError: A rank failed; the text names it and ends with its traceback.
        KeyboardInterrupt: The cell was interrupted; all ranks have ended.

    Ranks: called in the kernel, which is not a rank. The cell shows what all ranks print, as it comes.
    """
    __tracebackhide__ = True  # IPython leaves this frame out of a traceback
    _check(function, args, num_processes, grace_period)
    number = num_processes or _default_number()
    if number == 1:
        return function(*args)
    check_untouched()
    prepare_fork()
    group = RanksToStart(number=number, world_size=number, start_method="fork", grace_period=grace_period, in_cell=True)
    try:
        returned: _Returned = run_in_ranks(group, _be_rank, number, find_free_network_port(), function, args)
    except KeyboardInterrupt as error:
        raise show_in_cell(error, "KeyboardInterrupt: all ranks have ended.") from None
    return returned


def _be_rank(rank: int, number: int, port: int, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    apply_threads("auto", ranks_here=number)
    become_xla_rank(rank, number)
    return function(*args)


def _check(function: object, args: object, num_processes: object, grace_period: object) -> None:
    faults = Faults()
    faults.check(callable(function), "function", function, "the function itself, without calling it")
    right = isinstance(args, (tuple, list))
    faults.check(right, "args", args, "a tuple; for one argument write args=(argument,)")
    faults.whole("num_processes", num_processes, least=1, such_as=2, optional=True)
    faults.number("grace_period", grace_period, what="seconds", above=0, such_as=10)
    faults.raise_all()


def _default_number() -> int:
    gpus, chips = torch.cuda.device_count(), num_xla_ranks()
    number = gpus or chips or min(len(usable_cores()), _MOST_ON_CPU)
    what = "GPU" if gpus else "TPU chip" if chips else f"usable core, at most {_MOST_ON_CPU}"
    say(f"lightning-lockstep: num_processes={number}: one for each {what} of this host.")
    return number
