"""Each operation of torch.distributed over mpi4py while the guard is at work; writes down results and what it saw."""

import sys
import warnings

import torch
import torch.distributed as dist

from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.common.distributed.mpi.program_behaviour import caught
from tests.common.distributed.mpi.ranks_meet import hand_back, meet
from tests.ranks.distributed.guard.test_verify import other_buckets
from tests.ranks.distributed.guard.test_verify_agrees import PARTS

warnings.simplefilter("ignore")


def main():
    rank, _ = meet()
    seen = {"plain": [part(rank) for part in PARTS]}
    supervisor = RankSupervisor(SupervisorSettings(guard=sys.argv[2], stall_timeout=20.0))
    supervisor.ranks_have_met(prints_report=rank == 0)
    seen["guarded"] = supervisor.run(lambda: [part(rank) for part in PARTS])
    state = supervisor.guard.watch.state()
    seen["operations"] = sorted({one.call.operation for one in state.calls if one.call.number})
    seen["outstanding"] = [list(one) for one in state.outstanding]
    group = dist.new_group()
    seen["buckets"] = caught(other_buckets, rank, group)
    for _ in range(3 * rank):  # what rank 0 has begun with its other buckets
        caught(dist.all_reduce, torch.ones(7), group=group)
    dist.barrier()
    supervisor.guard.stop()
    hand_back(rank, seen)


if __name__ == "__main__":
    main()
