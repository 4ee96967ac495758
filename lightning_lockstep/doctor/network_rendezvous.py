"""How the agents find their coordinator: on this host, by ssh, or as ranks of another program."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_lockstep.distributed.rendezvous import ANY, known_job_token, on_one_host, own_address
from lightning_lockstep.doctor.check_runner import Checks
from lightning_lockstep.doctor.machine import last_line
from lightning_lockstep.doctor.network_agent import Agent, RankProcess, addresses_of_name, host_facts
from lightning_lockstep.doctor.network_links import (
    AgentGroup,
    ClosedError,
    Link,
    accept_ranks,
    connect,
    listen_at,
)
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.mpi_hosts import HostReport, host_fix, python_on, ssh_fault
from lightning_lockstep.launchers.rank_variables import (
    SRUN,
    address_of_node,
    find_mpi_rank,
    find_slurm_step,
    first_node,
)

# -- Which rank this process is, of ranks that torchrun, mpirun or srun has started, and where rank 0 is
# found

_JOB_NAMES = (
    *(
        "TORCHELASTIC_RUN_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_CLUSTER_NAME",
    ),
    *("PMIX_NAMESPACE", "PMI_JOBID", "OMPI_MCA_ess_base_jobid"),
)
_FIRST_PORT, _PORTS, _TRIES = 20_000, 11_000, 4


@dataclass(frozen=True)
class JoinedRank:
    """A rank that another program has started."""

    started_by: str
    rank: int
    size: int
    local_rank: int
    address: str | None  # of rank 0, by the environment variables; None where they do not say
    by_mpi: bool = False  # it is a rank of an MPI job

    @property
    def ports(self) -> list[int]:
        """Where rank 0 may listen: the same on all ranks of a job, and others for another job."""
        first = zlib.crc32(f"doctor\0{_job()}".encode()) % _PORTS
        return [_FIRST_PORT + (first + 977 * number) % _PORTS for number in range(_TRIES)]

    @property
    def token(self) -> str:
        """What both ends of a connection prove to know: derived from the job's token, or without one from its name."""
        return hashlib.sha256(f"doctor\0{known_job_token() or _job()}".encode()).hexdigest()


def _job() -> str:
    return "\0".join(os.environ.get(name, "") for name in _JOB_NAMES)


def _address_of(node: str) -> str:
    with suppress(LaunchError):
        return address_of_node(node)
    return node  # what cannot be resolved is reported where it is used


def joined_rank(environ: Mapping[str, str] | None = None) -> JoinedRank | None:
    """Return the rank that this process is, or ``None`` where it was started alone."""
    environ = os.environ if environ is None else environ
    given = environ.get("MASTER_ADDR")
    if "TORCHELASTIC_RUN_ID" in environ:
        numbers = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
        if all(number.isdecimal() for number in numbers):
            address = "127.0.0.1" if on_one_host() else given
            rank, size, local_rank = map(int, numbers)
            return JoinedRank("torchrun", rank, size, local_rank, address)
    by_mpi, step = find_mpi_rank(environ), find_slurm_step(environ)
    if by_mpi is not None and by_mpi.started_by != SRUN:
        address = "127.0.0.1" if by_mpi.local_size == by_mpi.size else given
        return JoinedRank(by_mpi.started_by, by_mpi.rank, by_mpi.size, by_mpi.local_rank, address, True)
    if step is not None:
        one = len(step.tasks_per_node) == 1
        address = given or ("127.0.0.1" if one else _address_of(first_node(step.nodes)))
        return JoinedRank(SRUN, step.rank, step.size, step.local_rank, address, by_mpi is not None)
    return None


# -- Connects the agents to their coordinator: started here, by ssh on other hosts, or ranks of another
# program

_ARRIVAL = 60.0  # longest wait for ranks that another program starts [s]
_START_MPI = 60.0
_FACTS = 20.0
_AT_ONCE = 8  # connections of ssh to a host; of more than 10 that have yet to log in, sshd drops some


class RendezvousError(Exception):
    """The ranks could not connect; the text names the rank and its error."""


def agents_here(count: int) -> AgentGroup:
    """Start agents on this host, and return them."""
    links: dict[int, Link] = {}
    threads = []
    for rank in range(count):
        links[rank], thread = _agent_here(Agent(rank))
        threads.append(thread)
    return _with_facts(AgentGroup(links, count, {}, threads))


def _agent_here(agent: Agent) -> tuple[Link, threading.Thread]:
    ours, theirs = socket.socketpair()
    link = Link.of_socket(theirs)
    name = f"doctor-agent-{agent.rank}"
    thread = threading.Thread(target=_serve, args=(agent, link), name=name, daemon=True)
    thread.start()
    return Link.of_socket(ours), thread


def _serve(agent: Agent, link: Link) -> None:
    agent.serve(link)
    link.close()


def agents_by_ssh(hosts: Sequence[str], per_host: int, ssh_args: Sequence[str] = ()) -> AgentGroup:
    """Start agents on other hosts by ssh, and return those that answer."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    group = AgentGroup({}, len(hosts) * per_host, {})
    commands = [
        python_on(host, ["-m", "lightning_lockstep.doctor.network_agent"], ssh_args) for host in hosts
    ]
    for first in range(0, per_host, _AT_ONCE):
        places = range(first, min(first + _AT_ONCE, per_host))
        started_now = [number * per_host + place for number in range(len(hosts)) for place in places]
        for rank in started_now:
            processes[rank], group.links[rank] = _agent_of_command(commands[rank // per_host], rank)
        _with_facts(group, started_now)
    for rank, process in processes.items():
        if rank not in group.facts:
            process.kill()
            assert process.stderr is not None
            output = process.stderr.read().decode(errors="replace")
            report = HostReport(hosts[rank // per_host], last_line(output) or "ssh exited without output")
            group.missing[rank] = f"on {report.host}, {_why(report)}"
            group.fixes[rank] = tuple(host_fix(report))
    return group


def _agent_of_command(command: Sequence[str], rank: int) -> tuple[subprocess.Popen[bytes], Link]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    link = Link(process.stdout, process.stdin, partial(_end, process))
    with suppress(ClosedError):
        link.send({"rank": rank})
    return process, link


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stderr):
        with suppress(OSError):
            if stream is not None:
                stream.close()


def _why(report: HostReport) -> str:
    if "No module named" in report.ssh:
        return f"the package is not installed there, or not in this Python: {report.ssh}"
    return ssh_fault(report)[0]


def gather_ranks(me: JoinedRank, checks: Checks) -> AgentGroup:
    """Return the agents of all ranks of a job, this one's among them; called on rank 0."""
    started = None
    if me.address is None:
        started = _start_mpi(me)
    here = me.address in ("127.0.0.1", "localhost")
    at = "127.0.0.1" if here else own_address(me.address) if me.address is not None else ANY
    try:
        server = listen_at(at, me.ports if me.address is not None else [0])
    except OSError as error:
        raise RendezvousError(f"rank 0 on {socket.gethostname()} cannot listen: {error}") from error
    port, token = server.getsockname()[1], me.token
    with server:
        if started is not None:
            token = secrets.token_hex(32)  # broadcast by MPI to the ranks, and to no other process
            place = {"addresses": host_facts()["outside"], "port": port, "token": token}
            _broadcast(started, place)
        own, thread = _agent_here(Agent(0, started, checks))
        others = accept_ranks(server, token, set(range(1, me.size)), _ARRIVAL)
    missing = {
        rank: f"it did not connect to {me.address or socket.gethostname()}:{port} within {_ARRIVAL:.0f} s"
        for rank in range(1, me.size)
        if rank not in others
    }
    return _with_facts(AgentGroup({0: own, **others}, me.size, missing, [thread]))


def join(me: JoinedRank, checks: Checks) -> str:  # checks: by this rank's own command line
    """Be the agent of a rank other than 0; return why that was not possible, or nothing."""
    started = None
    if me.address is None:
        try:
            started = _start_mpi(me)
            place = _broadcast(started, None)
        except RendezvousError as error:
            return str(error)
        places = [(address, int(place["port"])) for address in place["addresses"]]
        token = str(place["token"])
    else:
        places, token = [(me.address, port) for port in me.ports], me.token
    link, why = connect(places, token, me.rank, _ARRIVAL)
    if link is None:
        named = me.address or "rank 0"
        known = addresses_of_name(named) if me.address else []
        hint = f" {named} resolves to {', '.join(known)} here." if known and known != [named] else ""
        return f"rank {me.rank} on {socket.gethostname()} cannot connect to rank 0 ({why}).{hint}"
    Agent(me.rank, started, checks).serve(link)
    return ""


def _with_facts(group: AgentGroup, ranks: list[int] | None = None) -> AgentGroup:
    facts = group.ask("facts", _FACTS, {}, sorted(group.links) if ranks is None else ranks)
    for rank, answer in facts.items():
        if "host" in answer:
            group.facts[rank] = answer
        else:
            group.missing.setdefault(rank, str(answer.get("error")))
    group.give_hosts_unique_names()
    return group


def _start_mpi(me: JoinedRank) -> RankProcess:
    if not me.by_mpi:
        raise RendezvousError(
            f"{me.started_by} does not provide the address of rank 0: set MASTER_ADDR to the name or address of its"
            " host"
        )
    process = RankProcess("network_mpi.py", [], {})
    answer = process.step("start", _START_MPI, {})
    where = f"rank {me.rank} on {socket.gethostname()}"
    if not answer.get("ok"):
        process.end()
        raise RendezvousError(
            f"{where}: MPI does not start ({_fault(answer)}); it is needed to find rank 0."
            " To do without MPI, set MASTER_ADDR to the name or address of rank 0's host"
        )
    if answer.get("size") != me.size:
        process.end()
        raise RendezvousError(
            f"{where}: {me.started_by} has started {me.size} ranks, but MPI sees {answer.get('size')}:"
            f" mpi4py loads another MPI ({answer.get('library')}) than the one that started the ranks"
        )
    return process


def _broadcast(process: RankProcess, value: Any) -> dict[str, Any]:
    answer = process.step("exchange", _ARRIVAL, {"value": value})
    value_of_0 = answer.get("value")
    if not answer.get("ok") or not isinstance(value_of_0, dict):
        process.end()
        raise RendezvousError(f"rank on {socket.gethostname()}: an MPI broadcast failed ({_fault(answer)})")
    return value_of_0


def _fault(answer: dict[str, Any]) -> str:
    printed = last_line(str(answer.get("printed", "")))
    return f"{answer.get('error')}: {printed}" if printed else str(answer.get("error"))
