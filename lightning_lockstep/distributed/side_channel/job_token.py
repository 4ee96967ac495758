"""The secret that the ranks of one job share, and what is made of it: keys of the side channel, signatures.

Whoever starts the ranks makes the token and hands it on in their environment, where only processes of the same
user can read it. Where none of ours starts them (``torchrun``, ``srun``) and all are on one host, each derives it from
a file that only its user can read. On several hosts, rank 0 makes it and leaves it beside its address in the store of
the process group: as safe as that store is. ``docs/security.md`` has the table.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from lightning_lockstep._environment import JOB_TOKEN, job_token
from lightning_lockstep.distributed.interfaces import on_one_host
from lightning_lockstep.errors import LaunchError

__all__ = [
    "ChannelKeys",
    "channel_keys",
    "fingerprint",
    "known_job_token",
    "new_job_token",
    "signed",
    "token_for_children",
    "verified",
]

_SIGNATURE = hashlib.sha256().digest_size
# What tells a job of this user on this host from another.
_JOB_NAMES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_JOBID")


class ChannelKeys(NamedTuple):
    """Key pair of the sockets that take connections, the same on every rank of a job.

    Nobody but the ranks has either half: a stranger that lacks the public one cannot even begin a handshake.
    """

    public: bytes  # as ZeroMQ takes it
    secret: bytes


_made: str | None = None


def new_job_token() -> str:
    """Return a new token: 256 random bits as text."""
    return secrets.token_hex(32)


def known_job_token() -> str | None:
    """Return the token that this process was given, has made for the ranks it starts, or finds on its host.

    ``None`` where each rank would find another, or none.
    """
    return job_token() or _made or (_derived_here() if on_one_host() else None)


def token_for_children() -> dict[str, str]:
    """Return the variable that gives this job's token to ranks started here; made when first called."""
    global _made
    _made = known_job_token() or new_job_token()
    return {JOB_TOKEN: _made}


def channel_keys(token: str) -> ChannelKeys:
    seed = hashlib.blake2b(token.encode(), digest_size=32, person=b"lockstep-channel").digest()
    secret = z85.encode(seed)
    return ChannelKeys(zmq.curve_public(secret), secret)


def fingerprint(token: str) -> str:
    """Return what tells whether two ranks have the same token without giving it away."""
    return hashlib.blake2b(token.encode(), digest_size=8, person=b"lockstep-known").hexdigest()


def signed(content: bytes) -> bytes:
    """Return ``content`` with a signature of this job before it; the signature is void where no token is known."""
    token = known_job_token()
    return (hmac.digest(token.encode(), content, "sha256") if token else bytes(_SIGNATURE)) + content


def verified(data: bytes) -> bytes:
    """Return what another rank of this job has passed through :func:`signed`."""
    content = data[_SIGNATURE:]
    if not hmac.compare_digest(signed(content), data):
        raise LaunchError(
            "A message that claims to come from rank 0 is not signed with this job's token. Either two jobs meet at the"
            f" same MASTER_ADDR and MASTER_PORT, or the ranks were given different values of {JOB_TOKEN}: give each"
            " job a port of its own, and all its ranks the same token, or none."
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
