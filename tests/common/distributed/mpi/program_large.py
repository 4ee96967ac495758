"""Messages of more than 2^31 elements, which MPI cannot count in one call: each rank says what came out."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.common.distributed.mpi.ranks_meet import meet

COUNT = 2**31 + 1_000
PLACES = [0, 2**30, 2**31 - 1, 2**31, COUNT - 1]


def main():
    rank, _ = meet(seconds=120)
    big = torch.zeros(COUNT, dtype=torch.uint8)
    values = torch.arange(1, len(PLACES) + 1, dtype=torch.uint8)
    found = {}

    big[PLACES] = values * (rank + 1)
    dist.all_reduce(big)
    found["sum"] = big[PLACES].tolist()
    big[PLACES] = values + 10 * rank
    dist.all_reduce(big, dist.ReduceOp.MAX)
    found["max"] = big[PLACES].tolist()
    big[PLACES] = values + 20 * rank
    dist.broadcast(big, 1)
    found["broadcast"] = big[PLACES].tolist()
    if rank == 0:
        big[PLACES] = values + 40
        dist.send(big, 1)
    else:
        dist.recv(big, 0)
    found["message"] = big[PLACES].tolist()

    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
