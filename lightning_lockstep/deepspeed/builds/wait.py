"""How ranks wait for those that build: with a line now and then, for a limited time, and not for exited processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil

from lightning_lockstep._console import say
from lightning_lockstep._text import ranks_in_words, time_in_words
from lightning_lockstep.distributed.communicator import Communicator
from lightning_lockstep.distributed.side_channel.base import Message
from lightning_lockstep.errors import LaunchError

__all__ = ["Builder", "BuildOutcomes", "BuildProgress"]

# How often a building rank shows that it is alive [s].
_BEAT = 5.0
# A building rank that has sent no message for so long counts as lost [s].
_SILENCE = 90.0
# When the first line about a build is printed, and how long until the next [s].
_FIRST_LINE = 3.0
_NEXT_LINE = 15.0


@dataclass(frozen=True)
class Builder:
    """A rank that builds, for those that share its folder."""

    rank: int
    host: str
    pid: int
    started: float  # when its process did, to tell it from a later one of its number [s since 1970]
    for_ranks: tuple[int, ...] = ()  # the others that wait for it

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def is_alive(self) -> bool:
        """Return whether its process runs; only right on its host."""
        try:
            process = psutil.Process(self.pid)
            ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return process.status() not in ended and abs(process.create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class BuildProgress:
    """Shows, while its body runs, that a building rank is alive: to the other ranks, and to the user."""

    def __init__(self, builder: Builder, communicator: Communicator, topic: str) -> None:
        self.doing = "prepares DeepSpeed's ops"  # now, for the user
        self._builder, self._channel, self._topic = builder, communicator.side_channel, topic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-build", daemon=True)

    def __enter__(self) -> BuildProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = last_beat = time.monotonic()
        next_line = began + _FIRST_LINE
        while not self._over.wait(1.0):
            now = time.monotonic()
            if now - last_beat >= _BEAT:
                last_beat = now
                self._channel.post(self._topic, {"beat": True})
            if now >= next_line:
                next_line = now + _NEXT_LINE
                say(f"lightning-lockstep: {self._line(now - began)}")

    def _line(self, seconds: float) -> str:
        waiting = self._builder.for_ranks
        verb = "waits" if len(waiting) == 1 else "wait"
        wait = f"; {ranks_in_words(waiting)} {verb} for it" if waiting else ""
        return f"{self._builder} {self.doing} ({time_in_words(seconds)} so far){wait}"


class BuildOutcomes:
    """Collects how the builds of all building ranks ended."""

    def __init__(self, builders: Mapping[int, Builder], communicator: Communicator, topic: str) -> None:
        self._builders, self._communicator, self._topic = builders, communicator, topic
        self._news = threading.Condition()
        self._ended: dict[int, str] = {}
        now = time.monotonic()
        self._last_message = dict.fromkeys(builders, now)
        # Those whose processes this rank can see: they are on its host, and in the same container.
        self._watched = [
            builder
            for builder in builders.values()
            if builder.host == communicator.host and builder.is_alive()
        ]
        self._remove = communicator.side_channel.on(topic, self._take)

    def ended(self, fault: str) -> None:  # why it failed; empty: it did not
        """Tell all ranks how this rank's own build ended."""
        channel = self._communicator.side_channel
        with self._news:
            self._ended[self._communicator.rank] = fault
        channel.post(self._topic, {"fault": fault})
        if fault:
            channel.flush()  # this rank is about to end

    def wait(self, timeout: float) -> None:  # [s]
        """Wait until every build has ended well; a failure, or the end of its rank, is raised at once."""
        channel = self._communicator.side_channel
        with self._news:
            arrived = channel.wait_for(
                self._news, lambda: bool(self._faults()) or not self._missing(), timeout
            )
            faults, missing = self._faults(), self._missing()
        if faults:
            raise LaunchError(faults[0])
        if not arrived:
            names = ", ".join(str(self._builders[rank]) for rank in missing)
            if not channel.usable:
                raise LaunchError(f"Lost contact with {names} while it was building DeepSpeed's ops.")
            raise LaunchError(f"{names} did not finish building DeepSpeed's ops within {timeout:.0f} s.")

    def close(self) -> None:
        self._remove()

    def _take(self, message: Message) -> None:
        body: dict[str, Any] = message.body
        with self._news:
            self._last_message[message.sender] = time.monotonic()
            if "fault" in body:
                self._ended[message.sender] = body["fault"]
            self._news.notify_all()

    def _missing(self) -> list[int]:
        return [rank for rank in self._builders if rank not in self._ended]

    def _faults(self) -> list[str]:
        faults = [fault for _, fault in sorted(self._ended.items()) if fault]
        return faults or [text for rank in self._missing() if (text := self._lost(rank))]

    def _lost(self, rank: int) -> str | None:
        builder = self._builders[rank]
        if rank == self._communicator.rank:
            return None
        if builder in self._watched and not builder.is_alive():
            return f"{builder} exited while building DeepSpeed's ops (process {builder.pid}); its own output shows why."
        if time.monotonic() - self._last_message[rank] > _SILENCE:
            return f"{builder}, which builds DeepSpeed's ops, has sent no message for {_SILENCE:.0f} s."
        return None
