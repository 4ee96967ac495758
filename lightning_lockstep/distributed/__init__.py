"""All communication between ranks goes through this room.

Nothing that trains imports ``torch.distributed`` or ``mpi4py`` elsewhere. There are two ways:

* the **communicator** (:func:`current_communicator`): collectives, which every rank must call alike;
* the **side channel** (``communicator.side_channel``): messages over a connection and threads of its own,
  which work while the main thread sits in a collective and when a peer has exited.

Both know the run by its :class:`RankGroup` (rank, size, store), which need not come from torch.

| file | holds |
| --- | --- |
| `communicator`, `torch_communicator` | what ranks decide together; the same on a process group of torch |
| `process_group` | the ranks of a run as one group: the store at which they meet, and who is in it |
| `side_channel/` | messages between ranks that need no collective |
| `failure/` | how a rank fails, how the others learn of it, how a process ends |
| `guard/` | what ranks call, compared between them |
| `mpi/` | the backend `mpi4py` |
| `ddp/` | what is needed of DistributedDataParallel: its reducer, its communication hooks |
| `uneven/`, `local/` | tensors of different shapes gathered; collectives answered on one rank alone |
| `rank_order`, `stop_agreement` | one rank after the other; all leave a loop after the same step |
| `host_copies`, `c10d_operators`, `backend_threads` | tensors as bytes, and what torch's backends need |
| `interfaces` | the address at which a rank listens |
| `mpi_backend` | an old name of `mpi/backend`, kept for one release |
"""

from typing import TYPE_CHECKING

from lightning_lockstep._exports import lazy

if TYPE_CHECKING:
    from lightning_lockstep.distributed.communicator import Agreement as Agreement
    from lightning_lockstep.distributed.communicator import Communicator as Communicator
    from lightning_lockstep.distributed.communicator import PendingReduction as PendingReduction
    from lightning_lockstep.distributed.communicator import (
        SingleProcessCommunicator as SingleProcessCommunicator,
    )
    from lightning_lockstep.distributed.failure.propagation import FailurePropagation as FailurePropagation
    from lightning_lockstep.distributed.failure.record import FailureRecord as FailureRecord
    from lightning_lockstep.distributed.mpi.backend import MPIBackendOptions as MPIBackendOptions
    from lightning_lockstep.distributed.mpi.backend import register_mpi_backend as register_mpi_backend
    from lightning_lockstep.distributed.process_group import RankGroup as RankGroup
    from lightning_lockstep.distributed.process_group import rendezvous_store as rendezvous_store
    from lightning_lockstep.distributed.side_channel.base import LocalSideChannel as LocalSideChannel
    from lightning_lockstep.distributed.side_channel.base import Message as Message
    from lightning_lockstep.distributed.side_channel.base import SideChannel as SideChannel
    from lightning_lockstep.distributed.side_channel.gather import Gather as Gather
    from lightning_lockstep.distributed.side_channel.gather import Gathered as Gathered
    from lightning_lockstep.distributed.side_channel.zeromq import ZeroMQSideChannel as ZeroMQSideChannel
    from lightning_lockstep.distributed.stop_agreement import StepAgreement as StepAgreement
    from lightning_lockstep.distributed.torch_communicator import TorchCommunicator as TorchCommunicator
    from lightning_lockstep.distributed.torch_communicator import at_shut_down as at_shut_down
    from lightning_lockstep.distributed.torch_communicator import current_communicator as current_communicator
    from lightning_lockstep.distributed.torch_communicator import shut_down as shut_down
    from lightning_lockstep.distributed.torch_communicator import use_communicator as use_communicator
else:
    _NAMES = {
        "Agreement": "distributed.communicator",
        "Communicator": "distributed.communicator",
        "FailurePropagation": "distributed.failure.propagation",
        "FailureRecord": "distributed.failure.record",
        "Gather": "distributed.side_channel.gather",
        "Gathered": "distributed.side_channel.gather",
        "LocalSideChannel": "distributed.side_channel.base",
        "MPIBackendOptions": "distributed.mpi.backend",
        "Message": "distributed.side_channel.base",
        "PendingReduction": "distributed.communicator",
        "RankGroup": "distributed.process_group",
        "SideChannel": "distributed.side_channel.base",
        "SingleProcessCommunicator": "distributed.communicator",
        "StepAgreement": "distributed.stop_agreement",
        "TorchCommunicator": "distributed.torch_communicator",
        "ZeroMQSideChannel": "distributed.side_channel.zeromq",
        "at_shut_down": "distributed.torch_communicator",
        "current_communicator": "distributed.torch_communicator",
        "register_mpi_backend": "distributed.mpi.backend",
        "rendezvous_store": "distributed.process_group",
        "shut_down": "distributed.torch_communicator",
        "use_communicator": "distributed.torch_communicator",
    }
    __all__ = sorted(_NAMES)
    __getattr__, __dir__ = lazy(__name__, _NAMES)
