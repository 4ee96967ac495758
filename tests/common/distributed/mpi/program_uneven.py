"""gather_uneven over the backend mpi4py; writes down what each rank saw."""

import warnings

import torch
import torch.distributed as dist

from lightning_lockstep import CollectiveMismatchError, gather_uneven
from tests.common.distributed import uneven_gathers as uneven
from tests.common.distributed.mpi.ranks_meet import hand_back, meet


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
    hand_back(
        rank,
        {
            "cases": uneven.all_cases(),
            "mismatches": uneven.mismatches(),
            "missed backward": missed_backward(rank),
        },
    )


if __name__ == "__main__":
    main()
