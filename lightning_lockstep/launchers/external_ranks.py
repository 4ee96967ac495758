"""Who this process is among the ranks that torchrun, srun, mpirun or a user started together."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lightning_lockstep.launchers.rank_variables import started_from_outside


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
        here, given = getattr(environment, "here", None), os.environ.get("LOCAL_WORLD_SIZE", "")
        per_node = here.local_size if here is not None else int(given) if given.isdigit() else None
        # Under mpirun all ranks meet when they first ask for the address, which all of them do here.
        name = getattr(environment, "rendezvous_name", None)
        address, port = environment.main_address, environment.main_port
        return ExternalRanks(environment.global_rank(), count, per_node, address, port, name)
    if {"NODE_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # Started by hand on each node; each starts the other ranks of its node itself.
        return ExternalRanks(
            environment.node_rank(), None, None, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        )
    return None
