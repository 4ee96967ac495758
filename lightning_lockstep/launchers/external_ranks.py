"""Who this process is among the ranks that torchrun, srun, mpirun or a user started together."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_lockstep.launchers.rank_variables import find_slurm_step, started_from_outside


@dataclass(frozen=True)
class ExternalRanks:
    """Processes of one job that somebody else has started."""

    rank: int
    count: int | None  # None where each is the first of its node and will start others
    per_node: int | None  # on this node, as far as is known
    address: str  # of rank 0
    port: int
    name: str | None = None  # what all of them have in common, and those of no other job


def external_ranks() -> ExternalRanks | None:
    """Return who this process is among those that were started together, or `None` if it is alone."""
    if not started_from_outside():
        return None
    # Not above: these import torch and Lightning, which a program that looks at its command line does without.
    from lightning_lockstep.launchers.environments import detect_environment

    environment = detect_environment()
    if environment.creates_processes_externally:
        count = environment.world_size()
        if count < 2:
            return None
        rank, per_node = environment.global_rank(), _per_node(count)
        # Under mpirun the first look at the address is a meeting of all ranks, and all of them come by here.
        name = getattr(environment, "rendezvous_name", None)
        return ExternalRanks(rank, count, per_node, environment.main_address, environment.main_port, name)
    if {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # Started by hand on each node; each starts the other ranks of its node itself.
        return ExternalRanks(
            environment.node_rank(), None, None, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        )
    return None


def _per_node(count: int) -> int | None:
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    step = find_slurm_step()
    if step is not None and step.size == count:
        return step.local_size
    # An mpirun that sets no such variable; its step, if it has one, has a task for each node.
    nodes = os.environ.get("SLURM_NNODES", "")
    known = nodes.isdigit() and int(nodes) > 0 and count % int(nodes) == 0
    return count // int(nodes) if known else None
