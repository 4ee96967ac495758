"""Which host reaches which, and which step of a backend fails first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from lightning_lockstep._text import listed
from lightning_lockstep.doctor.network_links import AgentGroup
from lightning_lockstep.doctor.registry import Finding, ok, problem, warning

# -- Which host reaches which, at which address and from which interface; and what gloo would choose by
# itself

_REACH = 3.0  # longest wait for one address [s]
_TRIED = 4  # addresses of a host that are tried
_ALL_PAIRS = 16  # hosts up to which every pair is tried; beyond, each tries the next one and the first


@dataclass(frozen=True)
class Connections:
    """What the hosts of a group have seen of each other."""

    # By (from, to): the address at which ``to`` was reached, and from which interface.
    reached: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    # By (from, to): what was tried and failed.
    failed: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    # By host: the addresses that each host name resolves to there.
    resolved: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)

    def address_of_first(self, group: AgentGroup) -> str | None:
        """Return the address at which all hosts reach that of rank 0, or ``None``."""
        first = group.host(0)
        others = [host for host in group.hosts if host != first]
        found = [self.reached.get((host, first), ("", ""))[0] for host in others]
        return found[0] if found and found[0] and len(set(found)) == 1 else None

    def own_interfaces(self, group: AgentGroup) -> dict[str, str]:
        """Return the interface of each host at which the others reach it; empty if one has none."""
        found: dict[str, str] = {}
        for host, ranks in group.hosts.items():
            addresses = {address for (_, to), (address, _) in self.reached.items() if to == host}
            for name, own in group.facts[ranks[0]].get("interfaces", {}).items():
                if addresses & set(own):
                    found.setdefault(host, name)
        return found if found.keys() == group.hosts.keys() else {}

    def exports(self, group: AgentGroup, variable: str) -> list[str]:
        """Return the lines that give each host its interface."""
        own = self.own_interfaces(group)
        if len(set(own.values())) == 1:
            return [f"export {variable}={next(iter(own.values()))}"]
        return [f"export {variable}={name}  # on {host}" for host, name in own.items()]

    def findings(self, group: AgentGroup) -> Iterator[Finding]:
        """Yield what is wrong with names, addresses and connections."""
        yield from self._pairs(group)
        yield from self._names(group)
        yield from self._what_gloo_chooses(group)

    def _pairs(self, group: AgentGroup) -> Iterator[Finding]:
        if not self.failed:
            places = sorted({f"{to} at {address}" for (_, to), (address, _) in self.reached.items()})
            yield ok("connections", f"every host reaches the others ({listed(places, 8)})")
            return
        for (start, end), tried in self.failed.items():
            yield problem(
                "connections",
                f"{start} does not reach {end} on ports above 1024: {'; '.join(tried)}",
                *self._way_in(group, start, end, tried),
            )

    def _way_in(self, group: AgentGroup, start: str, end: str, tried: tuple[str, ...]) -> list[str]:
        if not any("no answer" in one for one in tried):
            return [f"# on {start}:", f"ip route get {_first_outside(group, end)}"]
        source = _first_outside(group, start)
        return [
            f"# a firewall drops the packets, or there is no route between the two. On {end}, as root:",
            f"ufw allow from {source}   # or: firewall-cmd --zone=trusted --add-source={source}",
        ]

    def _names(self, group: AgentGroup) -> Iterator[Finding]:
        for host, known in self.resolved.items():
            names = {
                name: group.facts[ranks[0]]["name"] for name, ranks in group.hosts.items() if name != host
            }
            unknown = [name for name, own in names.items() if not known.get(own)]
            if unknown:
                lines = [
                    f"echo '{_first_outside(group, name)} {names[name]}' | sudo tee -a /etc/hosts"
                    for name in unknown
                ]
                yield warning(
                    "host names",
                    f"{host} cannot resolve {', '.join(unknown)}; a MASTER_ADDR, hostfile or Slurm node list that"
                    " names such a host does not work there",
                    f"# on {host}:",
                    *lines,
                )

    def _what_gloo_chooses(self, group: AgentGroup) -> Iterator[Finding]:
        """Gloo listens at the address of the host's own name, unless GLOO_SOCKET_IFNAME is set."""
        interfaces = self.own_interfaces(group)
        for host, ranks in group.hosts.items():
            facts = group.facts[ranks[0]]
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


def _first_outside(group: AgentGroup, host: str) -> str:
    found = group.facts[group.hosts[host][0]].get("outside", [])
    return str(found[0]) if found else "ADDRESS"


def _of_other_networks(facts: Mapping[str, Any], own: str) -> list[str]:
    if not own:
        return []
    outside = set(facts["outside"])
    return [name for name, found in facts["interfaces"].items() if name != own and outside & set(found)]


def try_connections(group: AgentGroup, patience: float = 1.0) -> Connections:
    """Have the first rank of each host connect to the other hosts."""
    first = {host: ranks[0] for host, ranks in group.hosts.items()}
    hosts, agents = list(first), list(first.values())
    names_of_hosts = sorted({group.facts[rank]["name"] for rank in agents})
    resolved = group.ask("resolve", 20 * patience, {"names": names_of_hosts}, agents)
    family = "::" if all(_only_ipv6(group.facts[rank]) for rank in agents) else "0.0.0.0"
    listening = group.ask("listen", 5 * patience, {"address": family}, agents)
    reached: dict[tuple[str, str], tuple[str, str]] = {}
    failed: dict[tuple[str, str], tuple[str, ...]] = {}
    for distance in _distances(len(hosts)):
        pairs = {hosts[i]: hosts[(i + distance) % len(hosts)] for i in range(len(hosts))}
        tried: dict[str, list[str]] = {host: [] for host in hosts}
        for place in range(_TRIED):
            goals = {
                start: (group.facts[first[end]]["outside"][place], listening[first[end]].get("port"))
                for start, end in pairs.items()
                if (start, end) not in reached and place < len(group.facts[first[end]]["outside"])
            }
            goals = {start: goal for start, goal in goals.items() if goal[1] is not None}

            def given(rank: int, goals: dict[str, Any] = goals) -> dict[str, Any]:
                address, port = goals[group.host(rank)]
                return {"address": address, "port": port, "within": _REACH * patience}

            asked = [first[start] for start in goals]
            for rank, answer in group.ask("reach", 2 * _REACH * patience, given, asked).items():
                start = group.host(rank)
                address = goals[start][0]
                if answer.get("ok"):
                    reached[start, pairs[start]] = (address, str(answer.get("interface", "")))
                else:
                    place_there = f"{address}:{goals[start][1]}"
                    from_there = f" from interface {answer['interface']}" if answer.get("interface") else ""
                    tried[start].append(f"{place_there}{from_there}: {answer.get('error')}")
        for start, end in pairs.items():
            if (start, end) not in reached:
                failed[start, end] = tuple(tried[start]) or ("it has no address but loopback",)
    names = {group.host(rank): _lists(answer) for rank, answer in resolved.items() if "ok" not in answer}
    return Connections(reached, failed, names)


def _lists(answer: Mapping[str, Any]) -> dict[str, list[str]]:
    return {name: list(found) for name, found in answer.items() if isinstance(found, list)}


def _distances(count: int) -> list[int]:
    return list(range(1, count)) if count <= _ALL_PAIRS else [1, count - 1]


def _only_ipv6(facts: Mapping[str, Any]) -> bool:
    outside = facts.get("outside", [])
    return bool(outside) and all(":" in address for address in outside)


# -- The test of one backend in steps on all ranks: which step failed first, on which ranks, with which
# error

_IMPORT = 90.0  # longest time for importing torch, or starting MPI, on a busy or cold host [s]
_STEPS = {"rendezvous": 20.0, "barrier": 20.0, "all_reduce": 20.0, "memory": 20.0, "speed": 30.0}
_MPI_STEPS = {"exchange": 20.0, "barrier": 20.0, "all_reduce": 20.0, "speed": 30.0}
# A backend's own limit is that much shorter than ours, so that its error names what it waited for [s].
_EARLIER = 3.0


@dataclass(frozen=True)
class StepFault:
    """The error of one rank in the step that failed."""

    rank: int
    kind: str  # ``ended`` (its process died), ``silent`` (its host does not answer), ``error``, or ``late``
    error: str
    debug: str = ""  # what NCCL has written
    printed: str = ""  # to standard error, by its process


@dataclass(frozen=True)
class BackendResult:
    """How the test of a backend went."""

    backend: str
    step: str = ""  # the one that failed; empty where none did
    faults: tuple[StepFault, ...] = ()
    answers: Mapping[str, Mapping[int, Mapping[str, Any]]] = field(default_factory=dict)  # by step and rank

    @property
    def passed(self) -> bool:
        """Whether every step did what it should."""
        return not self.step

    @property
    def blamed(self) -> tuple[StepFault, ...]:
        """The faults that explain the others: a dead process before an error, an error before a wait."""
        for kind in ("ended", "silent", "error", "late"):
            found = tuple(fault for fault in self.faults if fault.kind == kind)
            if found:
                return found
        return ()

    def value(self, step: str, name: str) -> dict[int, Any]:
        """Return one value of the answers to a step, by rank."""
        return {rank: answer.get(name) for rank, answer in self.answers.get(step, {}).items()}


def try_backend(
    group: AgentGroup,
    backend: str,  # what follows a ``+`` distinguishes two tests of one backend
    address: str,  # of rank 0, as the others reach it
    *,
    environ: Callable[[int], Mapping[str, str]] = lambda rank: {},
    patience: float = 1.0,  # factor for all deadlines
) -> BackendResult:
    """Take the steps of a backend on all ranks, up to the first that fails."""
    answers: dict[str, Mapping[int, Mapping[str, Any]]] = {}
    is_mpi = backend.startswith("mpi4py")

    def begin(rank: int) -> dict[str, Any]:
        return {
            "backend": backend,
            "size": group.size,
            "local_rank": group.local_rank(rank),
            "environ": dict(environ(rank)),
            "debug": backend.startswith("nccl"),
        }

    def step(name: str, seconds: float, ranks: list[int] | None = None, **given: Any) -> bool:
        within = seconds * patience
        asked = {"backend": backend, "step": name, "within": within, "given": given}
        answers[name] = group.ask("step", within, asked, ranks)
        return all(answer.get("ok") for answer in answers[name].values())

    def steps() -> str:
        answers["begin"] = group.ask("begin", 10 * patience, begin)
        if not all(answer.get("ok") for answer in answers["begin"].values()):
            return "begin"
        if not step("start", _IMPORT):
            return "start"
        place: dict[str, Any] = {}
        if not is_mpi:
            if not step("listen", 10, [0], address=address, within=_STEPS["rendezvous"] * patience):
                return "listen"
            place = {"address": address, "port": answers["listen"][0]["port"]}
        for name, seconds in (_MPI_STEPS if is_mpi else _STEPS).items():
            given = {**place, "within": seconds * patience - _EARLIER} if name == "rendezvous" else {}
            if not step(name, seconds, **given):
                return name
        return ""

    failed = steps()
    group.ask("end", 15 * patience, {"backend": backend})
    faults = tuple(_fault(rank, answer) for rank, answer in answers[failed].items()) if failed else ()
    return BackendResult(backend, failed, tuple(fault for fault in faults if fault is not None), answers)


def _fault(rank: int, answer: Mapping[str, Any]) -> StepFault | None:
    if answer.get("ok"):
        return None
    kind = next((kind for kind in ("ended", "silent", "late") if kind in answer), "error")
    texts = {name: str(answer.get(name, "")) for name in ("error", "debug", "printed")}
    return StepFault(rank, kind, **texts)
