"""How a method of the process group becomes a collective.

This module is imported once MPI is up, never before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_lockstep.distributed.mpi.group_engine import Call, GroupEngine, Make
from lightning_lockstep.distributed.mpi.limits import LIMITS

__all__ = ["GroupPart", "Prepared", "collective", "is_small"]

Prepared = tuple[Call, Make, Any, bool]


class GroupPart:
    """What the parts of the process group share.

    Attributes:
        engine: Runs the operations.
    """

    engine: GroupEngine
    _comm: Any
    _rank: int
    _size: int


def collective(prepare: Callable[..., Prepared]) -> Callable[..., Any]:
    """Make a collective of a method that looks at its arguments and says what to do.

    Args:
        prepare: The method. What it raises over its arguments is raised on every rank.

    Ranks: all of the group.
    """

    @functools.wraps(prepare)
    def method(self: GroupPart, *args: Any, **options: Any) -> Any:
        try:
            call, make, opts, small = prepare(self, *args, **options)
        except (TypeError, ValueError) as error:
            raise self.engine.refuse(prepare.__name__, error) from None
        return self.engine.run(call, make, opts, small=small)

    return method


def is_small(tensor: Tensor) -> bool:
    """Return whether the caller steps an operation on this tensor itself, where it waits anyway."""
    return tensor.nbytes <= LIMITS.polled and not tensor.is_cuda
