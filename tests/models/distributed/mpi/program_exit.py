"""Rank 1 exits while ranks 0 and 2 disagree and go on between themselves, and then need it."""

import sys

import torch
import torch.distributed as dist

from lightning_lockstep.errors import CollectiveMismatchError
from tests.models.distributed.mpi.ranks_meet import meet


def main():
    rank, _ = meet(seconds=8)
    pair = dist.new_group([0, 2])
    if rank == 1:
        sys.exit(3)
    try:
        dist.all_reduce(torch.ones(3 + rank), group=pair)
    except CollectiveMismatchError as error:
        if rank == 0:
            print(error, flush=True)
    dist.all_reduce(torch.ones(3), group=pair)
    if rank == 0:
        print("the pair went on", flush=True)
    dist.all_reduce(torch.ones(3))


if __name__ == "__main__":
    main()
