"""The secret that the ranks of one job share, and what the side channel makes of it.

Whoever starts the ranks makes the token and hands it on in their environment, where only processes of the same
user can read it. Where none of ours starts them (``torchrun``, ``srun``), rank 0 makes it and leaves it beside its
address in the store of the process group: as safe as that store is. ``docs/security.md`` has the table.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import NamedTuple

import zmq
from zmq.utils import z85

from lightning_lockstep._environment import JOB_TOKEN, job_token

__all__ = ["ChannelKeys", "channel_keys", "known_job_token", "new_job_token", "token_for_children"]


class ChannelKeys(NamedTuple):
    """Key pair of the sockets that take connections, the same on every rank of a job.

    Nobody but the ranks has either half: a stranger that lacks the public one cannot even begin a handshake.

    Attributes:
        public: Public half, as ZeroMQ takes it.
        secret: Secret half.
    """

    public: bytes
    secret: bytes


_made: str | None = None


def new_job_token() -> str:
    """Return a new token: 256 random bits as text."""
    return secrets.token_hex(32)


def known_job_token() -> str | None:
    """Return the token that this process was given, or has made for the ranks that it starts."""
    return job_token() or _made


def token_for_children() -> dict[str, str]:
    """Return the variable that gives this job's token to ranks that this process starts; made on the first call.

    Ranks: the process that starts all the ranks of a job, before it does.
    """
    global _made
    _made = known_job_token() or new_job_token()
    return {JOB_TOKEN: _made}


def channel_keys(token: str) -> ChannelKeys:
    """Return the keys of the side channel of the job that has this token."""
    seed = hashlib.blake2b(token.encode(), digest_size=32, person=b"lockstep-channel").digest()
    secret = z85.encode(seed)
    return ChannelKeys(zmq.curve_public(secret), secret)
