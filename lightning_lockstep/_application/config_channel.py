"""Sends the configuration to ranks that exist before Hydra does: started by torchrun, srun or by hand.

Rank 0 alone reads the command line. The others wait at the rendezvous store for a message per job: its frozen
configuration, or that there is no further job, or that rank 0 has found the command line wrong.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_lockstep._settings import JOB_TOKEN
from lightning_lockstep._text import say
from lightning_lockstep.distributed.rendezvous import known_job_token, on_one_host, signed, verified
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.external_ranks import ExternalRanks
from lightning_lockstep.launchers.hydra import config_from_text, config_to_text

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Importing Lightning from a cold network file system can take rank 0 minutes.
FIRST_WAIT = 300.0
# A sweeper may think for long between two jobs; a rank 0 that has exited is noticed by its closed store.
NEXT_WAIT = 24 * 3600.0
# How long rank 0 waits for the others to receive its last message, if it hosts the store [s].
_LAST_MESSAGE = 30.0
_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Message:
    """What rank 0 sends to the others."""

    config: DictConfig | None = None  # the frozen one of the next job; None: to end
    last: bool = True  # no further job follows
    exit_code: int = 0  # with which to end

    def to_bytes(self) -> bytes:
        return signed(json.dumps([config_to_text(self.config), self.last, self.exit_code]).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Return what rank 0 made bytes of; a LaunchError without the signature of this job."""
        config, last, exit_code = json.loads(verified(data))
        return cls(config_from_text(config), last, exit_code)


class ConfigChannel:
    """Carries the messages of rank 0 to the others, in order."""

    def __init__(self, ranks: ExternalRanks | None) -> None:
        self.ranks = ranks  # None: a channel without receivers
        self.nodes: int | None = None  # as the configuration says, of nodes started by hand
        self._number = 0
        self._sent_last = False
        # A restarted attempt of torchrun finds the messages of the one before in the same store.
        self._prefix = f"lockstep/config/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def send(self, message: Message) -> None:
        if self.ranks is None:
            return
        unsigned = not on_one_host() and known_job_token() is None
        is_alone = self.ranks.count is None and self.nodes == 1
        if unsigned and not is_alone and message.config is not None and self._number == 0:
            say(
                "lightning-lockstep: the configuration is sent to the other hosts without a signature, so they accept"
                f" the first one that anyone writes to {self.ranks.address}:{self.ranks.port}. On a shared network"
                f" give all ranks the same {JOB_TOKEN}; see docs/security.md."
            )
        self._store().set(f"{self._prefix}/{self._number}", message.to_bytes())
        self._number += 1
        self._sent_last = message.last

    def close(self, exit_code: int, *, unusable: bool, wait: bool = True) -> None:
        """Let the other ranks end, unless they know that the job they have was the last."""
        # Where the configuration was wrong (``unusable``) they wait for a message even after the last job.
        # Without ``wait`` a store that is lost is no error; with it rank 0 waits until they have every
        # message, because it may host the store, which ends with it.
        if self.ranks is None:
            return
        # Torch's own kinds of lost connection derive from RuntimeError.
        with nullcontext() if wait else suppress(RuntimeError):
            if not self._sent_last or unusable:
                self.send(Message(exit_code=exit_code))
        if not wait:
            return
        # Without a number of nodes in the configuration, whoever comes in time is served.
        started = self.ranks.count or (self.nodes if isinstance(self.nodes, int) else None)
        deadline = time.monotonic() + _LAST_MESSAGE
        while time.monotonic() < deadline:
            received = self._store().add(f"{self._prefix}/received", 0)
            if started is not None and received >= self._number * (started - 1):
                return
            time.sleep(_LOOK_EVERY)

    def receive(self, *, patience: float | None = None) -> Message:  # [s]; None: as imports or a sweeper need
        assert self.ranks is not None
        key = f"{self._prefix}/{self._number}"
        if patience is None:
            patience = NEXT_WAIT if self._number else FIRST_WAIT
        began, store = time.monotonic(), None
        while time.monotonic() - began < patience:
            try:
                store = store or self._store(timeout=patience)
                # Asked again and again: a wait inside the store would let no signal through.
                if not store.check([key]):
                    time.sleep(_LOOK_EVERY)
                    continue
                data = store.get(key)
            except RuntimeError:  # torch's own kinds of lost connection all derive from it
                if self._number:
                    return Message()  # rank 0 has ended; its own exit code says how
                break
            message = Message.from_bytes(data)
            self._number += 1
            store.add(f"{self._prefix}/received", 1)
            return message
        waited = f"{time.monotonic() - began:.0f} s"
        how = f"within {waited}" if store is None else f"in {waited}, and then lost its connection,"
        raise LaunchError(
            f"Rank {self.ranks.rank} received no configuration from rank 0 {how} at"
            f" {self.ranks.address}:{self.ranks.port}. Look at what rank 0 has printed, and check that"
            " all ranks were given the same address and port."
        )

    def _store(self, timeout: float = FIRST_WAIT):  # type: ignore[no-untyped-def]  # torch's class stays in distributed/
        from lightning_lockstep.distributed.process_group import rendezvous_store

        assert self.ranks is not None
        ranks = self.ranks
        return rendezvous_store(
            ranks.rank,
            ranks.count or 1,
            address=ranks.address,
            port=ranks.port,
            timeout=timeout,
            name=ranks.name,
        )
