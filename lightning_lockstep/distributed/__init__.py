"""All communication between ranks goes through this subpackage.

Nothing that trains imports ``torch.distributed`` or ``mpi4py`` elsewhere. There are two ways:

* the **communicator** (:func:`current_communicator`): collectives, which every rank must call, in the same order;
* the **side channel** (``communicator.side_channel``): messages over a separate connection, on separate threads,
  which work while the main thread sits in a collective and when a peer has exited.

Both know the run by its :class:`RankGroup` (rank, size, store).
"""

from lightning_lockstep._registry import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
