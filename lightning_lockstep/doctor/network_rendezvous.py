"""How ranks that torchrun, mpirun or srun has started find each other for the network test: all connect to rank 0."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from lightning_lockstep.distributed.rendezvous import ANY, known_job_token, on_one_host, own_address
from lightning_lockstep.doctor.machine import last_line
from lightning_lockstep.doctor.network_ranks import Answer, ClosedError, Link, OtherProcess, RankGroup
from lightning_lockstep.doctor.network_stages import Probe, addresses_of_name, host_facts
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.rank_variables import (
    SRUN,
    address_of_node,
    find_mpi_rank,
    find_slurm_step,
    first_node,
)

# -- Which rank this process is, and where rank 0 is found --

# What all ranks of a job have in common.
_JOB_NAMES = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_CLUSTER_NAME",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "OMPI_MCA_ess_base_jobid",
)
_FIRST_PORT, _PORTS, _TRIES = 20_000, 11_000, 4


@dataclass(frozen=True)
class JoinedRank:
    """A rank that another program has started."""

    started_by: str
    rank: int
    size: int
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


def joined_rank(environ: Mapping[str, str] | None = None) -> JoinedRank | None:
    """Return the rank that this process is, or ``None`` where it was started alone."""
    environ = os.environ if environ is None else environ
    given = environ.get("MASTER_ADDR")
    if "TORCHELASTIC_RUN_ID" in environ:
        numbers = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE")]
        if all(number.isdecimal() for number in numbers):
            address = "127.0.0.1" if on_one_host() else given
            return JoinedRank("torchrun", int(numbers[0]), int(numbers[1]), address)
    by_mpi, step = find_mpi_rank(environ), find_slurm_step(environ)
    if by_mpi is not None and by_mpi.started_by != SRUN:
        address = "127.0.0.1" if by_mpi.local_size == by_mpi.size else given
        return JoinedRank(by_mpi.started_by, by_mpi.rank, by_mpi.size, address, True)
    if step is not None:
        one = len(step.tasks_per_node) == 1
        address = given or ("127.0.0.1" if one else _address_of(first_node(step.nodes)))
        return JoinedRank(SRUN, step.rank, step.size, address, by_mpi is not None)
    return None


def _address_of(node: str) -> str:
    with suppress(LaunchError):
        return address_of_node(node)
    return node  # what cannot be resolved is reported where it is used


# -- Rank 0 listens, the others connect --

_ARRIVAL = 60.0  # longest wait for ranks that another program starts [s]
_START_MPI = 60.0
_CONNECT = 3.0  # longest wait for one address [s]
_HANDSHAKE = 3  # longest time that rank 0 gives who has connected to prove itself [s]
_ANSWER = 10  # longest wait for rank 0, which looks at one connection after the other [s]
_IDLE = 600  # longest wait for a message afterwards [s]
_PAUSE = 0.2  # between two attempts [s]
_LONGEST = 1_000  # of a message before that proof [bytes]


class RendezvousError(Exception):
    """The ranks could not connect; the text names the rank and its error."""


def join_ranks(me: JoinedRank, tick: Callable[[], None] = lambda: None) -> RankGroup:
    """Connect the ranks of a job: all to rank 0."""
    mpi = _start_mpi(me) if me.address is None else None
    try:
        group = _ranks_of_job(me, mpi, tick) if me.rank == 0 else _group_of_first(me, mpi)
    except RendezvousError:
        if mpi is not None:
            mpi.end()
        raise
    try:
        group.meet()
    except BaseException:
        group.close()  # MPI's process, too, which its mpirun would miss
        raise
    return group


def _ranks_of_job(me: JoinedRank, mpi: Probe | None, tick: Callable[[], None]) -> RankGroup:
    here = me.address in ("127.0.0.1", "localhost")
    at = "127.0.0.1" if here else own_address(me.address) if me.address is not None else ANY
    try:
        server = listen_at(at, me.ports if me.address is not None else [0])
    except OSError as error:
        raise RendezvousError(f"rank 0 on {socket.gethostname()} cannot listen: {error}") from error
    port, token = server.getsockname()[1], me.token
    with server:
        if mpi is not None:
            token = secrets.token_hex(32)  # broadcast by MPI to the ranks, and to no other process
            _broadcast(mpi, {"addresses": host_facts()["outside"], "port": port, "token": token})
        links = accept_ranks(server, token, set(range(1, me.size)), _ARRIVAL)
    where = f"{me.address or socket.gethostname()}:{port}"
    absent = {
        rank: f"it did not connect to {where} within {_ARRIVAL:.0f} s"
        for rank in range(1, me.size)
        if rank not in links
    }
    others = [OtherProcess(link, [rank]) for rank, link in links.items()]
    return RankGroup(me.size, [0], others, mpi=mpi, absent=absent, tick=tick)


def _group_of_first(me: JoinedRank, mpi: Probe | None) -> RankGroup:
    if mpi is not None:
        place = _broadcast(mpi, None)
        places = [(address, int(place["port"])) for address in place["addresses"]]
        token = str(place["token"])
    else:
        places, token = [(str(me.address), port) for port in me.ports], me.token
    link, why = connect(places, token, me.rank, _ARRIVAL)
    if link is None:
        named = me.address or "rank 0"
        known = addresses_of_name(named) if me.address else []
        hint = f" {named} resolves to {', '.join(known)} here." if known and known != [named] else ""
        raise RendezvousError(
            f"rank {me.rank} on {socket.gethostname()} cannot connect to rank 0 ({why}).{hint}"
        )
    return RankGroup(me.size, [me.rank], first=link, mpi=mpi)


def listen_at(address: str, ports: list[int]) -> socket.socket:
    """Return a socket that listens at the first free port; of 0, at any."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((address, port), family=family)
    raise OSError(f"no port of {', '.join(map(str, ports))} is free at {address}")


def accept_ranks(server: socket.socket, token: str, expected: set[int], timeout: float) -> dict[int, Link]:
    """Return the link of every rank that has come in time [s]."""
    found: dict[int, Link] = {}
    port = server.getsockname()[1]
    deadline = time.monotonic() + timeout
    while expected - set(found) and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            connection, _ = server.accept()
        except OSError:
            break
        rank, link = _rank_behind(connection, token, 0, port, _HANDSHAKE)
        if rank in expected - set(found):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found[rank] = link
        else:
            link.close()
    return found


def connect(
    places: list[tuple[str, int]], token: str, rank: int, timeout: float
) -> tuple[Link | None, str]:  # timeout: [s]
    """Return the link to rank 0, tried at each place until the time is over, or why there is none."""
    deadline = time.monotonic() + timeout
    faults: dict[str, str] = {}
    while time.monotonic() < deadline:
        for host, port in places:
            try:
                connection = socket.create_connection((host, port), timeout=_CONNECT)
            except OSError as error:
                faults[f"{host}:{port}"] = str(error)
                continue
            found, link = _rank_behind(connection, token, rank, port, min(_ANSWER, int(timeout) + 1))
            if found == 0:
                return link, ""
            link.close()
            faults[f"{host}:{port}"] = (
                "the process listening there did not prove that it is rank 0 of this job"
            )
        time.sleep(_PAUSE)
    return None, "; ".join(f"{place}: {fault}" for place, fault in faults.items()) or "no address is known"


def _rank_behind(
    connection: socket.socket, token: str, rank: int, port: int, patience: int
) -> tuple[int, Link]:  # port: of rank 0
    """Return the link of a connection and the rank at its other end, -1 for a process that is no rank of this job."""
    # Both prove that they know the job's token, which is never sent: what ranks report stands in rank 0's table, with
    # lines to paste. The port is part of the proof: who listens at another one of rank 0's host cannot pass it on.
    link = Link.of_socket(connection, patience)
    limit = threading.Timer(patience, link.close)  # for who sends a byte now and then
    limit.daemon = True
    limit.start()
    with suppress(ClosedError, OSError, ValueError, KeyError, TypeError, OverflowError):
        nonce = secrets.token_hex(32)
        link.send(rank=rank, nonce=nonce)
        theirs = link.receive(_LONGEST)
        link.send(proof=_proof(token, rank, port, theirs["nonce"]))
        proof = link.receive(_LONGEST)["proof"]
        limit.cancel()
        if hmac.compare_digest(proof, _proof(token, int(theirs["rank"]), port, nonce)):
            link.set_patience(_IDLE)
            return int(theirs["rank"]), link
    limit.cancel()
    return -1, link


def _proof(token: str, rank: int, port: int, nonce: str) -> str:
    return hmac.digest(token.encode(), f"{rank} {port} {nonce}".encode(), "sha256").hex()


# -- MPI as the way to find rank 0, where no variable gives its address --


def _start_mpi(me: JoinedRank) -> Probe:
    if not me.by_mpi:
        raise RendezvousError(
            f"{me.started_by} does not provide the address of rank 0: set MASTER_ADDR to the name or address of its"
            " host"
        )
    probe = Probe("mpi4py", [me.size])
    answer = probe.steps({"start": _START_MPI})["start"]
    if not answer["ok"]:
        probe.end()
        raise RendezvousError(
            f"rank {me.rank} on {socket.gethostname()}: MPI does not start ({_fault(answer)}); it is needed to find"
            " rank 0. To do without MPI, set MASTER_ADDR to the name or address of rank 0's host"
        )
    return probe


def _broadcast(probe: Probe, value: Answer | None) -> Answer:
    probe.go_on(value=value)
    answer = probe.steps({"exchange": _ARRIVAL})["exchange"]
    if not answer["ok"] or not isinstance(answer.get("value"), dict):
        raise RendezvousError(f"rank on {socket.gethostname()}: an MPI broadcast failed ({_fault(answer)})")
    return dict(answer["value"])


def _fault(answer: Answer) -> str:
    printed = last_line(str(answer.get("printed", "")))
    return f"{answer.get('error')}: {printed}" if printed else str(answer.get("error"))
