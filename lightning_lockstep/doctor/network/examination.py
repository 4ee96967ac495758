"""The network test from end to end: every stage in turn, and what each has found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lightning_lockstep._text import ranks_in_words, size_in_words
from lightning_lockstep.doctor.findings import Finding, not_applicable, ok, problem, warning
from lightning_lockstep.doctor.network.backends import BackendResult, try_backend
from lightning_lockstep.doctor.network.connections import Connections, try_connections
from lightning_lockstep.doctor.network.group import AgentGroup
from lightning_lockstep.doctor.network.report import backend_finding

__all__ = ["devices_of_hosts", "examine", "reported_ranks"]

_SMALL_SHARED_MEMORY = 2**28  # per rank of a host, below which NCCL or loaders run out of it [bytes]


def examine(group: AgentGroup, *, mpi: bool, patience: float = 1.0) -> Iterator[Finding]:
    """Yield what each stage finds, in the order in which ranks would meet the fault."""
    # mpi: the ranks are those of an MPI job, so MPI can be tested on them; patience: factor for all deadlines
    yield from reported_ranks(group)
    if len(group.ranks) < 2:
        return
    yield from _shared_memory(group)
    connections = None
    if len(group.hosts) > 1:
        connections = try_connections(group, patience)
        yield from connections.findings(group)
    if len(group.ranks) < group.size:
        yield not_applicable("backends", "not every rank has reported, so no collective can complete")
        return
    address = "127.0.0.1" if connections is None else connections.address_of_first(group)
    if address is None:
        yield not_applicable("backends", "no address of rank 0 can be reached from all hosts")
        return
    yield from _backends(group, address, connections, mpi=mpi, patience=patience)


def reported_ranks(group: AgentGroup) -> Iterator[Finding]:
    """Yield which ranks have reported, and which have not."""
    places = "; ".join(f"{host}: {ranks_in_words(ranks)}" for host, ranks in group.hosts.items())
    if not group.missing:
        yield ok("ranks", f"all {group.size} reported ({places})")
        return
    for rank, why in sorted(group.missing.items()):
        yield problem(
            "ranks",
            f"rank {rank} of {group.size} did not report: {why}. Reported: {places or 'none'}",
            *group.fixes.get(
                rank, ("# look at the output of that rank, and at the firewall of rank 0's host",)
            ),
        )


def _shared_memory(group: AgentGroup) -> Iterator[Finding]:
    for host, ranks in group.hosts.items():
        sizes = group.facts[ranks[0]].get("shared_memory")
        if not sizes:
            yield warning("shared memory", f"{host}: there is no /dev/shm; NCCL and data loaders need it")
            continue
        size, free = sizes
        if free < _SMALL_SHARED_MEMORY * len(ranks):
            yield warning(
                "shared memory",
                f"{host}: /dev/shm has {size_in_words(size)}, of which {size_in_words(free)} are free, for {len(ranks)}"
                " ranks; NCCL and data loader workers fail with a bus error when it is full",
                "# in a container: docker run --shm-size=8g (or --ipc=host); elsewhere:",
                "sudo mount -o remount,size=8G /dev/shm",
            )


def _backends(
    group: AgentGroup, address: str, connections: Connections | None, *, mpi: bool, patience: float
) -> Iterator[Finding]:
    gloo = try_backend(group, "gloo", address, patience=patience)
    yield backend_finding(group, gloo)
    if not gloo.passed and connections is not None and (own := connections.own_interfaces(group)):
        again = try_backend(
            group,
            "gloo+interface",
            address,
            environ=lambda rank: {"GLOO_SOCKET_IFNAME": own[group.host(rank)]},
            patience=patience,
        )
        yield _cure(
            again, "gloo", "with GLOO_SOCKET_IFNAME set", connections.exports(group, "GLOO_SOCKET_IFNAME")
        )
    if gloo.step not in ("begin", "start"):
        yield from _nccl(group, gloo, address, patience)
    if mpi:
        yield backend_finding(group, try_backend(group, "mpi4py", address, patience=patience))


def _nccl(group: AgentGroup, gloo: BackendResult, address: str, patience: float) -> Iterator[Finding]:
    devices = devices_of_hosts(group.hosts, gloo)
    if not any(devices.values()):
        yield not_applicable("nccl", "torch finds no CUDA device on any rank's host")
        return
    crowded = [
        f"{host} has {devices[host]} for {len(ranks)} ranks"
        for host, ranks in group.hosts.items()
        if devices[host] < len(ranks)
    ]
    if crowded:
        yield not_applicable("nccl", f"it needs one device per rank: {'; '.join(crowded)}")
        return
    versions = gloo.value("start", "nccl")
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"rank {rank}: {version}" for rank, version in versions.items())
        yield warning("nccl", f"the ranks have different versions of NCCL ({listed})")
    nccl = try_backend(group, "nccl", address, patience=patience)
    yield backend_finding(group, nccl)
    if nccl.passed:
        return
    again = try_backend(
        group, "nccl+p2p", address, environ=lambda rank: {"NCCL_P2P_DISABLE": "1"}, patience=patience
    )
    yield _cure(
        again,
        "nccl",
        "with NCCL_P2P_DISABLE=1: peer-to-peer copies between GPUs fail or corrupt data on this host, most often"
        " because PCIe access control (ACS) or the IOMMU redirects them",
        [
            "export NCCL_P2P_DISABLE=1",
            "# better: switch ACS off in the BIOS, or boot with iommu=pt; `sudo lspci -vvv | grep ACSCtl` shows it",
        ],
    )
    if not again.passed and any(group.facts[rank].get("iommu") for rank in group.ranks):
        yield warning(
            "nccl", "an IOMMU is on, which can corrupt copies between GPUs: try booting with iommu=pt"
        )


def devices_of_hosts(hosts: Mapping[str, Sequence[int]], started: BackendResult) -> dict[str, int]:
    """Return how many devices the ranks of each host take, by their numbers on it.

    Under ``srun --gpus-per-task=1`` each rank sees one device, and each another one.
    """
    counts, uuids = started.value("start", "devices"), started.value("start", "uuids")
    found: dict[str, int] = {}
    for host, ranks in hosts.items():
        seen = [list(uuids.get(rank) or []) for rank in ranks]
        if all(seen):
            found[host] = len({one[place % len(one)] for place, one in enumerate(seen)})
        else:
            found[host] = int(counts.get(ranks[0]) or 0)
    return found


def _cure(again: BackendResult, name: str, what: str, lines: list[str]) -> Finding:
    subject = f"{name}, second try"
    if again.passed:
        return problem(subject, f"it works {what}", *lines)
    return not_applicable(subject, f"it also fails {what.partition(':')[0]}, in the step {again.step}")
