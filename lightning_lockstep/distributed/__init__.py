"""All communication between ranks goes through this room.

Nothing outside it imports ``torch.distributed``, ``mpi4py`` or ``torch_xla``. There are two ways:

* the **communicator** (:func:`current_communicator`): collectives, which every rank must call alike;
* the **side channel** (``communicator.side_channel``): messages over a connection and threads of its own,
  which work while the main thread sits in a collective and when a peer has exited.

Both know the run by its :class:`RankGroup` (rank, size, store), which need not come from torch.
"""

from lightning_lockstep.distributed.communicator import (
    Agreement,
    Communicator,
    PendingReduction,
    SingleProcessCommunicator,
)
from lightning_lockstep.distributed.failure.propagation import FailurePropagation
from lightning_lockstep.distributed.failure.record import FailureRecord
from lightning_lockstep.distributed.process_group import RankGroup, rendezvous_store
from lightning_lockstep.distributed.side_channel.base import (
    LocalSideChannel,
    Message,
    SideChannel,
)
from lightning_lockstep.distributed.side_channel.gather import Gather, Gathered
from lightning_lockstep.distributed.side_channel.zeromq import ZeroMQSideChannel
from lightning_lockstep.distributed.torch_communicator import (
    TorchCommunicator,
    at_shut_down,
    current_communicator,
    shut_down,
    use_communicator,
)

__all__ = [
    "Agreement",
    "Communicator",
    "FailurePropagation",
    "FailureRecord",
    "Gather",
    "Gathered",
    "LocalSideChannel",
    "Message",
    "PendingReduction",
    "RankGroup",
    "SideChannel",
    "SingleProcessCommunicator",
    "TorchCommunicator",
    "at_shut_down",
    "current_communicator",
    "rendezvous_store",
    "shut_down",
    "ZeroMQSideChannel",
    "use_communicator",
]
