"""Check ``network``: every stage in turn, and of a backend the first step that failed and whom to blame."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_lockstep._text import (
    first_line,
    install_command,
    listed,
    ranks_in_words,
    size_in_words,
    time_in_words,
)
from lightning_lockstep.doctor.machine import MORE_SHARED_MEMORY, Machine, last_line
from lightning_lockstep.doctor.network import REACH_ALL, STEPS, Answer, Ranks, ranks_here, reach_others
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning
from lightning_lockstep.errors import LaunchError


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Test the network between the ranks of the job, or if there is none, between ranks of this host."""
    if options.ranks is not None:
        try:
            yield from examine(options.ranks, options.backends)
        except (LaunchError, RuntimeError) as error:  # a message that is not signed, a lost store
            yield problem("ranks", str(error), "export MASTER_PORT=ANOTHER_PORT")
        return
    try:
        from lightning_lockstep.distributed.process_group import forget_rendezvous, process_group_exists

        ranks = ranks_here(options.nproc or 2)
    except ImportError as error:
        yield problem("ranks", f"torch cannot be imported: {first_line(error)}", "lockstep-doctor packages")
        return
    try:
        yield from examine(ranks, options.backends)
    finally:
        ranks.end(0)
        if not process_group_exists():
            forget_rendezvous()  # a run that begins with these checks goes on in this process


# -- All stages in turn, in the order in which ranks would meet the error --

_SMALL_SHARED_MEMORY = 2**28  # per rank of a host, below which NCCL or loaders run out of it [bytes]


def examine(ranks: Ranks, backends: Sequence[str]) -> Iterator[Finding]:
    """Yield what each stage finds. Ranks: all, together; rank 0 shows it."""
    ranks.meet()
    yield from _reported(ranks)
    if ranks.size < 2:
        return
    for host, of_host in ranks.hosts.items():
        yield from _shared_memory(host, len(of_host), ranks.facts[of_host[0]]["shared_memory"])
    paths: Paths = {}
    if len(ranks.hosts) > 1:
        yield from _connections(ranks, paths)
    if len(ranks.facts) < ranks.size:
        yield not_applicable("backends", "not every rank has reported, so no collective can complete")
        return
    for backend in backends:
        if backend == "nccl" and not all(facts["devices"] for facts in ranks.facts.values()):
            yield not_applicable("nccl", "torch does not find a CUDA device on the host of each rank")
        elif backend != "mpi4py" or all(facts["of_mpi"] for facts in ranks.facts.values()):
            yield from _backend(ranks, backend, paths)


def _reported(ranks: Ranks) -> Iterator[Finding]:
    places = "; ".join(f"{host}: {ranks_in_words(of_host)}" for host, of_host in ranks.hosts.items())
    if missing := set(range(ranks.size)) - ranks.facts.keys():
        who = f"{ranks_in_words(missing)} of {ranks.size}"
        evidence = f"{who} did not report at {ranks.address}:{ranks.port} in time. Reported: {places}"
        fix = "# look at what these ranks have printed, and at the firewall of rank 0's host"
        yield problem("ranks", evidence, fix)
    else:
        yield ok("ranks", f"all {ranks.size} reported ({places})")
    for package in ("lightning-lockstep", "torch"):
        by_version: dict[str, list[int]] = {}
        for rank, facts in ranks.facts.items():
            by_version.setdefault(facts[package], []).append(rank)
        if len(by_version) > 1:
            told = "; ".join(f"{version} on {ranks_in_words(found)}" for version, found in by_version.items())
            fix = install_command()
            if package == "torch":
                fix = f"pip install torch=={ranks.facts[0]['torch'].partition('+')[0]}"
            yield problem("versions", f"{package} differs: {told}", fix)


def _shared_memory(host: str, count: int, free: int | None) -> Iterator[Finding]:
    if free is None:
        yield warning("shared memory", f"{host}: there is no /dev/shm; NCCL and data loaders need it")
    elif free < _SMALL_SHARED_MEMORY * count:
        yield warning(
            "shared memory",
            f"{host}: {size_in_words(free)} of /dev/shm are free for {count} ranks: NCCL and data loader workers that"
            " need more fail with a bus error",
            *MORE_SHARED_MEMORY,
        )


Paths = dict[tuple[str, str], str]  # at which address a host reaches another one


def _connections(ranks: Ranks, paths: Paths) -> Iterator[Finding]:
    """Have the first rank of each host connect to the other hosts."""
    hosts = {
        host: {**ranks.facts[of_host[0]], "rank": of_host[0], "addresses": ranks.facts[of_host[0]]["outside"]}
        for host, of_host in ranks.hosts.items()
    }
    answers = ranks.share({rank: reach_others(hosts, rank) for rank in ranks.mine}, REACH_ALL)
    silent = {"the others": {"tried": ["it did not answer in time"]}}
    for start, host in hosts.items():
        for end, found in answers.get(host["rank"], silent).items():
            if "address" in found:
                paths[start, end] = found["address"]
                continue
            source = next(iter(host["outside"]), "ADDRESS")
            yield problem(
                "connections",
                f"{start} does not reach {end} on ports above 1024: {'; '.join(found['tried'])}",
                f"# a firewall drops the packets, or there is no route between the two. On {end}, as root:",
                f"ufw allow from {source}   # or: firewall-cmd --zone=trusted --add-source={source}",
            )
    if len(paths) == len(hosts) * (len(hosts) - 1):
        places = sorted({f"{end} at {address}" for (_, end), address in paths.items()})
        yield ok("connections", f"every host reaches the others ({listed(places, 8)})")


# -- A backend, and if it fails the variable that may cure it: advised only if it was tried and worked --

_P2P, _GLOO_INTERFACE, _NCCL_INTERFACE = "NCCL_P2P_DISABLE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_CURES = {"gloo": (_GLOO_INTERFACE,), "nccl": (_P2P, _NCCL_INTERFACE)}
# What happens without the variable.
_UNSET = {
    _GLOO_INTERFACE: "unset, gloo listens at the address that a host's own name stands for",
    _NCCL_INTERFACE: "unset, NCCL takes an interface that the other hosts do not reach",
    _P2P: "peer-to-peer copies between GPUs fail or corrupt data on this host, most often because PCIe access control"
    " (ACS) or the IOMMU redirects them; better: switch ACS off in the BIOS, or boot with iommu=pt",
}


def _backend(ranks: Ranks, backend: str, paths: Paths) -> Iterator[Finding]:
    found = _try(ranks, backend)
    errors = [fault["error"] for fault in found.faults.values()]
    if found.step == "meet" and all(error.startswith("LookupError") for error in errors):
        yield not_applicable(backend, f"it needs one device per rank: {errors[0].partition(': ')[2]}")
        return
    first = found.finding()
    is_curable = found.step not in ("", "start", "meet") and all(found.answers.values())
    for variable in _CURES.get(backend, ()) if is_curable else ():
        values = dict.fromkeys(ranks.hosts, "1") if variable == _P2P else _interfaces(ranks, paths)
        if not values or (variable == _NCCL_INTERFACE and len(ranks.hosts) < 2):
            continue
        if step := _try(ranks, backend, variable, values).step:
            told = f"{first.evidence}. With {variable} set it fails too, in {_NAMES.get(step, step)!r}"
            first = replace(first, evidence=told)
            continue
        lines = [f"export {variable}={value}  # on {host}" for host, value in values.items()]
        if len(set(values.values())) == 1:
            lines = [f"export {variable}={next(iter(values.values()))}"]
        given = {facts["variables"].get(variable) for facts in ranks.facts.values()} - {None}
        why = f"it was set to {', '.join(sorted(given))}" if given else _UNSET[variable]
        how = f"{variable}={listed(list(dict.fromkeys(values.values())), _SHOWN)}"
        told = f"{first.evidence}. It works with {how}; {why}"
        first = replace(first, evidence=told, fix=tuple(lines))
        break
    yield first


def _interfaces(ranks: Ranks, paths: Paths) -> dict[str, str]:
    """Return the interface of each host at which the others reach it; empty if one has none."""
    found: dict[str, str] = {}
    for host, of_host in ranks.hosts.items():
        addresses = {address for (_, end), address in paths.items() if end == host} or {ranks.address}
        for name, own in ranks.facts[of_host[0]]["interfaces"].items():
            if addresses & set(own):
                found.setdefault(host, name)
    return found if found.keys() == ranks.hosts.keys() else {}


def _try(ranks: Ranks, backend: str, variable: str = "", values: Mapping[str, str] | None = None) -> Trial:
    hosts = ranks.hosts
    local_ranks = {rank: place for of_host in hosts.values() for place, rank in enumerate(of_host)}
    variables = {rank: {variable: value} for host, value in (values or {}).items() for rank in hosts[host]}
    # Those of other processes may still start; later steps are shorter, and of one that fails all are told.
    answers = ranks.share(ranks.test(backend, local_ranks, variables), STEPS["start"])
    return Trial(backend, hosts, {rank: answers.get(rank, {}) for rank in range(ranks.size)})


# -- The test of one backend on all ranks: which step failed first, on which ranks, with which error --

_NAMES = {"all_reduce": "all-reduce", "memory": "memory allocation", "large": "large all-reduce"}
# Of errors, those that explain the others first: a process that ended, a rank that does not answer, an error, a step
# that did not end in time, and an error that says that another rank was waited for.
_KINDS = ("ended", "silent", "error", "late", "waited")
_WAITED = re.compile("time(d )?.?out|another rank", re.IGNORECASE)
_SILENT: Answer = {"ok": False, "silent": True, "error": "it did not answer in time"}
# Where in its sources a backend writes from, which is long and of no use here.
_SOURCE = re.compile(r"\[(enforce fail at )?/?[\w./-]+\.(cc|cpp|h):\d+\] ?")
_SHOWN = 4  # errors of ranks that are shown in full
_FIXES = {
    "SIGKILL": "dmesg | grep -i 'out of memory'  # who killed it: the kernel or the scheduler",
    "SIGBUS": "# /dev/shm is full: docker run --shm-size=8g, or sudo mount -o remount,size=8G /dev/shm",
    "ModuleNotFoundError": f"{install_command('mpi')}  # on each host that lacks it",
    "out of memory": "nvidia-smi  # lists the processes that use these devices",
    "loads another MPI": "lockstep-doctor mpi",
}
_MORE = {
    "gloo": "TORCH_CPP_LOG_LEVEL=INFO",
    "nccl": "NCCL_DEBUG=INFO",
    "mpi4py": "OMPI_MCA_btl_base_verbose=20",
}


@dataclass(frozen=True)
class Trial:
    backend: str
    hosts: Mapping[str, Sequence[int]]
    answers: Mapping[int, Answer]  # by rank, then by step

    @property
    def step(self) -> str:
        """The first step that failed; empty if none did."""
        taken = [(step, answer["ok"]) for steps in self.answers.values() for step, answer in steps.items()]
        silent = "" if all(self.answers.values()) else "start"
        return next((step for step in STEPS if (step, False) in taken), silent)

    @property
    def faults(self) -> dict[int, Answer]:
        """What the ranks answered on which that step failed."""
        found = {rank: steps.get(self.step) if steps else _SILENT for rank, steps in self.answers.items()}
        return {rank: answer for rank, answer in found.items() if answer is not None and not answer["ok"]}

    @property
    def blamed(self) -> dict[int, Answer]:
        """The errors that explain the others."""
        kinds = {rank: _kind_of(fault) for rank, fault in self.faults.items()}
        first = min(kinds.values(), key=_KINDS.index, default="")
        return {rank: fault for rank, fault in self.faults.items() if kinds[rank] == first}

    def finding(self) -> Finding:
        if not self.step:
            seconds = max(steps["large"]["seconds"] for steps in self.answers.values())
            evidence = f"{len(self.answers)} ranks connect, all-reduce correct, one of 16 MB takes"
            return ok(self.backend, f"{evidence} {time_in_words(seconds)}")
        step, blamed, faults = _NAMES.get(self.step, self.step), self.blamed, self.faults
        where = "all ranks" if len(blamed) == len(self.answers) else ranks_in_words(blamed)
        lines = [f"the step {step!r} failed on {where}: {listed(self._errors(blamed), _SHOWN)}"]
        if others := {rank: fault for rank, fault in faults.items() if rank not in blamed}:
            after = f"{ranks_in_words(others)} failed or timed out after that"
            lines.append(f"{after} ({listed(self._errors(others), 1)})")
        if done := self.answers.keys() - faults.keys():
            lines.append(f"{ranks_in_words(done)} completed it")
        if debug := next((fault["debug"] for fault in blamed.values() if fault.get("debug")), ""):
            lines.append(f"NCCL's own log: {debug}")
        texts = " ".join(fault["error"] for fault in blamed.values())
        more = f"export {_MORE[self.backend]}  # before a run: it then prints more"
        fix = next((line for mark, line in _FIXES.items() if mark in texts), more)
        return problem(f"{self.backend}: {step}", ". ".join(lines), fix)

    def _errors(self, faults: Mapping[int, Answer]) -> list[str]:
        """Return each error with its ranks and host."""
        host_of = {rank: host for host, ranks in self.hosts.items() for rank in ranks}
        by_error: dict[tuple[str, str], list[int]] = {}
        for rank, fault in faults.items():
            error = _SOURCE.sub("", fault["error"])
            if "ended" in fault and (printed := last_line(fault["printed"])):
                error = f"{error} ({printed})"
            by_error.setdefault((host_of[rank], error), []).append(rank)
        return [f"{ranks_in_words(ranks)} on {host}: {error}" for (host, error), ranks in by_error.items()]


def _kind_of(fault: Answer) -> str:
    kind = next((kind for kind in ("ended", "silent", "late") if kind in fault), "error")
    return "waited" if kind == "error" and _WAITED.search(fault["error"]) else kind
