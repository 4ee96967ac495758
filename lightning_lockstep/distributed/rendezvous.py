"""How ranks of a job find each other: the address at which a rank listens, and the token by which it is known."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from lightning_lockstep._settings import JOB_TOKEN
from lightning_lockstep.errors import LaunchError

# -- Which of its addresses a rank listens at: the one that the other ranks use, and no other --

#: Every address of this host.
ANY = "0.0.0.0"
_LOOPBACK = ("127.0.0.1", "127.0.1.1", "::1")
_THIS_HOST = (*_LOOPBACK, "localhost")


def own_address(name: str) -> str:
    """Return the address of this host to give to ranks that know it by ``name``."""
    if on_one_host():
        return "127.0.0.1"
    found = addresses_of(name)
    if name in _THIS_HOST:  # whoever can reach rank 0 by this is on its host
        return next(iter(found), "127.0.0.1")
    return next(iter(_reachable(found)), ANY)  # others can use none of them: 127.0.1.1, address translation


def listening_address(name: str) -> str:
    """Return the address at which this host has to listen so that ranks find it by ``name`` itself."""
    found = addresses_of(name)
    if on_one_host() or name in _THIS_HOST:
        return next((address for address in found if is_own(address)), ANY)
    reachable = _reachable(found)
    return reachable[0] if len(reachable) == 1 == len(found) else ANY  # others may take another address


# Variables with the number of ranks on this host and of the job: torchrun, Open MPI, MPICH.
_SIZES = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)


def on_one_host() -> bool:
    """Return whether the program that started this rank says that all ranks of the job are on this host."""
    environ = os.environ  # so that every rank gets the same answer
    if any(environ.get(here, "") == environ.get(everywhere, " ") for here, everywhere in _SIZES):
        return True
    return "SLURM_PROCID" in environ and environ.get("SLURM_STEP_NUM_NODES") == "1"


def _reachable(addresses: list[str]) -> list[str]:
    """Return those of this host's addresses that another host could use, those of IPv4 first."""
    own = [address for address in addresses if address not in _LOOPBACK and is_own(address)]
    return sorted(own, key=lambda address: ":" in address)


def address_towards(host: str) -> str:
    """Return the address of this host from which it reaches ``host``."""
    for address in addresses_of(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # a datagram socket: the route is looked up, no packet leaves
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_towards(host: str) -> str:
    """Return the interface from which this host reaches ``host``; empty if there is no route."""
    own = address_towards(host)
    return next((name for name, addresses in interfaces().items() if own in addresses), "")


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each interface of this host that is up, loopback included."""
    import psutil

    families, up = (socket.AF_INET, socket.AF_INET6), psutil.net_if_stats()
    found = {
        name: [one.address.partition("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def addresses_here() -> list[str]:
    return [address for addresses in interfaces().values() for address in addresses]


def addresses_of(name: str) -> list[str]:
    """Return the addresses that a host name stands for here; none if it is not known."""
    with suppress(ValueError):
        return [str(ip_address(name.strip("[]")))]
    with suppress(OSError):
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)  # may ask a name server
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
    return []


def is_own(address: str) -> bool:
    """Return whether this process can listen at an address, all of loopback included."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return True
    return False


# -- The secret that the ranks of one job share, and what is made of it: keys of the side channel, signatures --
# docs/security.md says who makes the token and who knows it.

_SIGNATURE = hashlib.sha256().digest_size
# Variables that tell a job of this user on this host from another one.
_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")

_made: str | None = None


def new_job_token() -> str:
    return secrets.token_hex(32)


def known_job_token() -> str | None:
    """Return the token that this process was given, has made for its ranks, or finds on its host, if any."""
    return os.environ.get(JOB_TOKEN) or _made or (_derived_here() if on_one_host() else None)


def token_for_children() -> dict[str, str]:
    """Return the variable that gives this job's token to ranks started here; made when first called."""
    global _made
    _made = known_job_token() or new_job_token()
    return {JOB_TOKEN: _made}


def channel_keys(token: str) -> tuple[bytes, bytes]:
    """Return (public key, secret key), as ZeroMQ takes them, of the socket that takes connections."""
    # Nobody but the ranks has either half: a stranger that lacks the public one cannot even begin a handshake.
    import zmq
    from zmq.utils import z85

    seed = hashlib.blake2b(token.encode(), digest_size=32, person=b"lockstep-channel").digest()
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret


def fingerprint(token: str) -> str:
    """Return what tells whether two ranks have the same token without giving it away."""
    return hashlib.blake2b(token.encode(), digest_size=8, person=b"lockstep-known").hexdigest()


def signed(content: bytes) -> bytes:
    """Return ``content`` with a signature of this job before it; the signature is zeros if no token is known."""
    token = known_job_token()
    return (hmac.digest(token.encode(), content, "sha256") if token else bytes(_SIGNATURE)) + content


def verified(data: bytes) -> bytes:
    """Return the content of a message that another rank of this job has signed; raise if it has not."""
    content = data[_SIGNATURE:]
    if not hmac.compare_digest(signed(content), data):
        raise LaunchError(
            "A message that claims to come from rank 0 is not signed with this job's token. Either two jobs meet at the"
            f" same MASTER_ADDR and MASTER_PORT, or the ranks were given different values of {JOB_TOKEN}: give each"
            " job a different port, and all its ranks the same token, or none."
        )
    return content


def _derived_here() -> str | None:
    """Return the token of this job made of the key of this user, which is a file of mode 0600."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    path = Path(cache, "lightning-lockstep", "key")
    with suppress(OSError, RuntimeError):
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = path.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(32))
            with suppress(FileExistsError):
                os.link(draft, path)  # whole, and the first of several ranks wins
            draft.unlink()
        state = path.stat()
        if state.st_uid == os.geteuid() and not state.st_mode & 0o077:
            job = "\0".join(os.environ.get(name, "") for name in _JOB_NAMES)
            return hmac.new(path.read_bytes(), job.encode(), "sha256").hexdigest()
    return None
