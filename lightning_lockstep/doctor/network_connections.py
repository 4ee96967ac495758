"""Which host reaches which: at which address, from which interface; and what gloo would choose by itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from lightning_lockstep._text import listed
from lightning_lockstep.doctor.network_ranks import Answer, RankGroup
from lightning_lockstep.doctor.network_stages import addresses_of_name, echo_server, reach
from lightning_lockstep.doctor.registry import Finding, ok, problem, warning

_REACH = 3.0  # longest wait for one address [s]
_TRIED = 4  # addresses of a host that are tried
_ALL_PAIRS = 16  # hosts up to which every pair is tried; beyond, each tries the next one and the first


@dataclass(frozen=True)
class Connections:
    """What the hosts of a group have seen of each other."""

    group: RankGroup
    # By (from, to): the address at which ``to`` was reached, and from which interface.
    reached: Mapping[tuple[str, str], tuple[str, str]]
    # By (from, to): what was tried and failed.
    failed: Mapping[tuple[str, str], tuple[str, ...]]
    # By host: the addresses that each host name resolves to there.
    resolved: Mapping[str, Mapping[str, list[str]]]

    def address_of_first(self) -> str | None:
        """Return the address at which all hosts reach that of rank 0, or ``None``."""
        first = self.group.host(0)
        others = [host for host in self.group.hosts if host != first]
        found = [self.reached.get((host, first), ("", ""))[0] for host in others]
        return found[0] if found and found[0] and len(set(found)) == 1 else None

    def own_interfaces(self) -> dict[str, str]:
        """Return the interface of each host at which the others reach it; empty if one has none."""
        found: dict[str, str] = {}
        for host, ranks in self.group.hosts.items():
            addresses = {address for (_, to), (address, _) in self.reached.items() if to == host}
            for name, own in self.group.facts[ranks[0]].get("interfaces", {}).items():
                if addresses & set(own):
                    found.setdefault(host, name)
        return found if found.keys() == self.group.hosts.keys() else {}

    def exports(self, variable: str) -> list[str]:
        """Return the lines that give each host its interface."""
        own = self.own_interfaces()
        if len(set(own.values())) == 1:
            return [f"export {variable}={next(iter(own.values()))}"]
        return [f"export {variable}={name}  # on {host}" for host, name in own.items()]

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with names, addresses and connections."""
        yield from self._pairs()
        yield from self._names()
        yield from self._what_gloo_chooses()

    def _pairs(self) -> Iterator[Finding]:
        if not self.failed:
            places = sorted({f"{to} at {address}" for (_, to), (address, _) in self.reached.items()})
            yield ok("connections", f"every host reaches the others ({listed(places, 8)})")
            return
        for (start, end), tried in self.failed.items():
            yield problem(
                "connections",
                f"{start} does not reach {end} on ports above 1024: {'; '.join(tried)}",
                *self._way_in(start, end, tried),
            )

    def _way_in(self, start: str, end: str, tried: tuple[str, ...]) -> list[str]:
        if not any("no answer" in one for one in tried):
            return [f"# on {start}:", f"ip route get {_first_outside(self.group, end)}"]
        source = _first_outside(self.group, start)
        return [
            f"# a firewall drops the packets, or there is no route between the two. On {end}, as root:",
            f"ufw allow from {source}   # or: firewall-cmd --zone=trusted --add-source={source}",
        ]

    def _names(self) -> Iterator[Finding]:
        for host, known in self.resolved.items():
            names = {
                name: self.group.facts[ranks[0]]["name"]
                for name, ranks in self.group.hosts.items()
                if name != host
            }
            unknown = [name for name, own in names.items() if not known.get(own)]
            if unknown:
                lines = [
                    f"echo '{_first_outside(self.group, name)} {names[name]}' | sudo tee -a /etc/hosts"
                    for name in unknown
                ]
                yield warning(
                    "host names",
                    f"{host} cannot resolve {', '.join(unknown)}; a MASTER_ADDR, hostfile or Slurm node list that"
                    " names such a host does not work there",
                    f"# on {host}:",
                    *lines,
                )

    def _what_gloo_chooses(self) -> Iterator[Finding]:
        """Gloo listens at the address of the host's own name, unless GLOO_SOCKET_IFNAME is set."""
        interfaces = self.own_interfaces()
        for host, ranks in self.group.hosts.items():
            facts = self.group.facts[ranks[0]]
            chosen = facts["variables"].get("GLOO_SOCKET_IFNAME")
            outside = _of_other_networks(facts, interfaces.get(host, ""))
            fix = [f"export GLOO_SOCKET_IFNAME={interfaces[host]}  # on {host}"] if host in interfaces else []
            if chosen is not None:
                if chosen not in facts["interfaces"]:
                    known = ", ".join(facts["interfaces"])
                    evidence = f"{host}: GLOO_SOCKET_IFNAME={chosen}, but it has only {known}"
                    yield problem("interfaces", evidence, *fix)
                continue
            own = facts["own_name"]
            if not own or ip_address(own[0]).is_loopback:
                where = facts["hosts_line"]
                line = f" by the line {where!r} of /etc/hosts" if where else ""
                meaning = f"resolves to {own[0]}{line}" if own else "cannot be resolved"
                evidence = f"{host}: its own name {meaning}, so gloo listens on loopback, which no other host reaches"
                yield problem("interfaces", evidence, *fix)
            elif interfaces.get(host) and own[0] not in facts["interfaces"][interfaces[host]]:
                evidence = (
                    f"{host}: its own name resolves to {own[0]}, where gloo listens; the other hosts reach it at"
                    f" {interfaces[host]}"
                )
                yield problem("interfaces", evidence, *fix)
            elif outside and "NCCL_SOCKET_IFNAME" not in facts["variables"]:
                yield warning(
                    "interfaces",
                    f"{host} has several: ranks use {interfaces[host]}, but NCCL may choose {', '.join(outside)}",
                    f"export NCCL_SOCKET_IFNAME={interfaces[host]}  # on {host}",
                )


def _first_outside(group: RankGroup, host: str) -> str:
    found = group.facts[group.hosts[host][0]].get("outside", [])
    return str(found[0]) if found else "ADDRESS"


def _of_other_networks(facts: Mapping[str, Any], own: str) -> list[str]:
    if not own:
        return []
    outside = set(facts["outside"])
    return [name for name, found in facts["interfaces"].items() if name != own and outside & set(found)]


def try_connections(group: RankGroup) -> Connections:
    """Have the first rank of each host connect to the other hosts."""
    first = {host: ranks[0] for host, ranks in group.hosts.items()}
    hosts, ranks = list(first), list(first.values())
    names = sorted({group.facts[rank]["name"] for rank in ranks})
    listeners: list[socket.socket] = []

    def resolve(_: int) -> Answer:
        return {"names": {name: addresses_of_name(name) for name in names}}

    def listen(_: int) -> Answer:
        listeners.append(echo_server())
        return {"port": listeners[-1].getsockname()[1]}

    def reach_others(rank: int) -> Answer:
        with ThreadPoolExecutor(len(hosts)) as pool:
            found = {end: pool.submit(reach_one, end) for end in _goals(hosts, group.host(rank))}
            return {"found": {end: future.result() for end, future in found.items()}}

    def reach_one(end: str) -> Answer:
        answer = listening[first[end]]
        if "port" not in answer:
            return {"tried": [f"nothing listens there: {answer['error']}"]}
        addresses = group.facts[first[end]]["outside"][:_TRIED]
        return reach(addresses, answer["port"], _REACH)

    resolved = group.all("host names", 20, resolve, ranks)
    listening = group.all("listen", 5, listen, ranks)
    answers = group.all("connections", 2 * _TRIED * _REACH + 1, reach_others, ranks)
    for listener in listeners:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # which also ends the thread that accepts
        listener.close()
    reached: dict[tuple[str, str], tuple[str, str]] = {}
    failed: dict[tuple[str, str], tuple[str, ...]] = {}
    for start, rank in first.items():
        for end in _goals(hosts, start):
            answer = answers[rank].get("found", {}).get(end, {"tried": [answers[rank].get("error")]})
            if "tried" in answer:
                failed[start, end] = tuple(answer["tried"])
            else:
                reached[start, end] = (answer["address"], answer["interface"])
    known = {group.host(rank): answer["names"] for rank, answer in resolved.items() if "names" in answer}
    return Connections(group, reached, failed, known)


def _goals(hosts: list[str], start: str) -> list[str]:
    """Return the hosts that one host tries to reach."""
    if len(hosts) <= _ALL_PAIRS:
        return [host for host in hosts if host != start]
    following = hosts[(hosts.index(start) + 1) % len(hosts)]
    return [host for host in dict.fromkeys((following, hosts[0])) if host != start]
