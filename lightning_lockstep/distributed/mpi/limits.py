"""Sizes that steer the backend ``mpi4py``."""

from __future__ import annotations

__all__ = ["LIMITS", "Limits"]


class Limits:
    """Sizes at which a transfer is cut; tests lower them to walk the same paths with small tensors.

    Attributes:
        piece: Bytes of one piece of a reduction by MPI.
        count: Elements of one MPI call.
        polled: Bytes up to which a collective is never a blocking one, nor goes through shared memory.
        slice: Bytes that each rank of a node adds at once in shared memory.
        shared: Bytes of shared memory that the ranks of a node take for one group at most.
    """

    piece = 8 * 2**20
    count = 2**30
    polled = 2**16
    slice = 2**20
    shared = 48 * 2**20


LIMITS = Limits()
