"""gather_uneven over the backend mpi4py; writes down what each rank saw."""

import warnings

import torch
import torch.distributed as dist

from lightning_lockstep import CollectiveMismatchError, gather_uneven
from tests.common.distributed.mpi.ranks_meet import hand_back, meet
from tests.ranks.distributed import test_gather_uneven as uneven


def missed_backward(rank):
    """The last rank leaves backward out and goes on to another collective: what each is told, and what works after."""
    parts = gather_uneven(torch.ones(rank + 1, requires_grad=True))
    try:
        if rank == dist.get_world_size() - 1:
            dist.all_reduce(torch.ones(3))
        else:
            sum(part.sum() for part in parts).backward()
    except CollectiveMismatchError as error:
        return [str(error), len(gather_uneven(torch.ones(rank)))]


def main():
    warnings.simplefilter("ignore")
    rank, _ = meet()
    seen = {
        "backend": dist.get_backend(),
        "unlike values": uneven.unlike_values(),
        "gradients": [uneven.gradients(dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)],
        "gradients of one rank": uneven.gradients_of_one_rank(0),
        "many tensors": uneven.long_description(),
        "mismatch": [uneven.mismatched(case) for case in ("dtype", "keys")],
        "missed backward": missed_backward(rank),
        "groups": uneven.in_groups(),
    }
    hand_back(rank, seen)


if __name__ == "__main__":
    main()
