"""Hearing from every rank without a collective."""

from __future__ import annotations

import threading
import time
from typing import Any

from lightning_lockstep.distributed.side_channel.base import Message, SideChannel

__all__ = ["exchange"]


def exchange(
    channel: SideChannel, topic: str, body: Any, *, timeout: float, to: int | None = None
) -> dict[int, Any]:
    """Tell every rank something and hear what each of them says on the same topic.

    Unlike a collective it cannot hang: a rank that does not take part is missing from the answer.

    Args:
        channel: The side channel of the run.
        topic: Name of this one meeting; never used again.
        body: What this rank says; anything that JSON can hold.
        timeout: Longest wait for the others [s].
        to: The one rank that hears it, and so the only one that waits; ``None`` for all.

    Returns:
        What each rank said, by rank, in rank order. This rank's own word is the object given.

    Ranks: all that reach this point, in any order; one message to each other rank.
    """
    said: dict[int, Any] = {channel.rank: body}
    if channel.world_size == 1:
        return said
    if to is not None and to != channel.rank:
        channel.post(topic, body, to=to)
        return said
    news = threading.Condition()

    def take(message: Message) -> None:
        with news:
            said[message.sender] = message.body
            news.notify_all()

    if to is None:
        channel.post(topic, body)
    remove = channel.on(topic, take)
    deadline = time.monotonic() + timeout
    with news:
        while len(said) < channel.world_size and (left := deadline - time.monotonic()) > 0:
            news.wait(left)
    remove()
    with news:
        return dict(sorted(said.items()))
