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
"""

from lightning_lockstep._exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
