"""Check ``network``: ranks connect, wait for each other and add up numbers, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_lockstep.doctor.hosts import hosts_of
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.network_examination import examine, mpi_here
from lightning_lockstep.doctor.network_ranks import ranks_by_ssh, ranks_here
from lightning_lockstep.doctor.registry import CheckOptions, Finding, check

_WHY = """
Most hangs at the start of a run are ranks that do not reach each other: a host name that another host cannot resolve, a
firewall that lets ssh through and nothing else, a backend that listens at the wrong interface. The ranks then wait in
init_process_group, and no message names the missing rank. This check takes the same steps one by one, each with
a deadline: which ranks have connected, which host reaches which, rendezvous, barrier, all-reduce, memory, speed; for
gloo, for nccl where there is a device for each rank, and for mpi4py. So a failure names the step, the rank, its host
and the interface.
"""


@check(
    name="network",
    summary="ranks connect and communicate: gloo, nccl, mpi4py, stage by stage",
    why=_WHY,
    needs_ranks=True,
    timeout=600.0,
)
def network(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Test the network between ranks."""
    # Ranks of torchrun, mpirun and srun do not come here: see hosts.ChecksOfRanks.
    hosts = [host.name for host in hosts_of(options)]
    count = options.nproc or (1 if hosts else 2)
    group = ranks_by_ssh(hosts, count, ["network"], options) if hosts else ranks_here(count)
    try:
        yield from examine(group, mpi=False)
    finally:
        group.close()
    if not hosts:
        yield mpi_here(machine, count)
