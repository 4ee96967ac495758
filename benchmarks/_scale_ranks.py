"""Ranks of bench_scale that do not train: rank 0, one rank that fails, and many that only hold their connection.

Each process takes commands as lines of JSON on its standard input, and answers with one line each. Times are those of
the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import sys
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

import zmq

HOST = "127.0.0.1"
# Longer than any measurement: nobody is to end its process.
_GRACE = 3600.0
_LIMIT = 300.0
_LINE = "x" * 200


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main_rank(world_size: int, token: str) -> None:
    """Be rank 0: its own code, with nothing left out."""
    # Not above: the many have no use for torch, which comes with it.
    from lightning_lockstep.distributed.failure.propagation import FailurePropagation
    from lightning_lockstep.distributed.rendezvous import channel_keys
    from lightning_lockstep.distributed.side_channel.zeromq import ZeroMQSideChannel

    channel = ZeroMQSideChannel(0, world_size, host=HOST, keys=channel_keys(token))
    lines: list[float] = []
    channel.on("scale/line", lambda message: lines.append(time.monotonic()))
    propagation = FailurePropagation(channel)
    propagation.attempt.grace_period = _GRACE
    say(address=channel.address)
    for line in sys.stdin:
        (command,) = json.loads(line)
        if command == "connected":
            for rank in range(1, world_size):
                _wait(functools.partial(channel.answers, rank))
            say(time=time.monotonic())
        elif command == "lines":
            _wait(lambda: len(lines) >= world_size - 1)
            say(time=lines[-1])
        elif command == "propagate":
            propagation.enter()
            say(listens=True)
        elif command == "failed":
            _wait(lambda: propagation.attempt.has_failure)
            say(rank=propagation.attempt.record.rank if propagation.attempt.record else None)
    os._exit(0)


def failing_rank(rank: int, world_size: int, token: str, address: str) -> None:
    """Be a rank that raises when it is told to."""
    from lightning_lockstep.distributed.failure.propagation import FailurePropagation
    from lightning_lockstep.distributed.rendezvous import channel_keys
    from lightning_lockstep.distributed.side_channel.zeromq import ZeroMQSideChannel

    channel = ZeroMQSideChannel(rank, world_size, host=HOST, keys=channel_keys(token), main_address=address)
    propagation = FailurePropagation(channel)
    propagation.attempt.grace_period = _GRACE
    propagation.enter()
    say(connected=channel.wait_for(lambda: channel.answers(0), _LIMIT))
    for line in sys.stdin:
        (command,) = json.loads(line)
        if command == "line":
            channel.post("scale/line", _LINE, to=0)
            say(posted=True)
        elif command == "fail":
            raised = time.monotonic()
            try:
                raise ValueError("the loss is nan in a layer with a long name " + "x" * 300)
            except ValueError as error:
                propagation.error_to_raise(error)
            say(raised=raised)
    os._exit(0)


def many_ranks(first: int, count: int, key: str, address: str) -> None:
    """Hold the connections of ranks that answer what they are asked; each is a socket of ZeroMQ's of its own."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    say(ready=True)
    sys.stdin.readline()  # all begin to connect at once
    hello = json.dumps(["channel/hello", [socket.gethostname(), os.getpid()]]).encode()
    poller, ranks = zmq.Poller(), []
    for rank in range(first, first + count):
        one = context.socket(zmq.DEALER)
        one.linger, one.sndhwm, one.rcvhwm = 0, 0, 0
        one.identity = str(rank).encode()
        one.curve_publickey, one.curve_secretkey = zmq.curve_keypair()
        one.curve_serverkey = key.encode()
        one.heartbeat_ivl, one.heartbeat_timeout = 5_000, 120_000
        one.connect(address)
        one.send(hello)
        poller.register(one, zmq.POLLIN)
        ranks.append(one)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    came: dict[str, list[float]] = defaultdict(list)
    while True:
        for one, _ in poller.poll():
            if one == sys.stdin.fileno():
                _obey(ranks, came)
                continue
            with suppress(zmq.Again):
                while True:
                    topic, body = json.loads(one.recv(zmq.NOBLOCK))
                    if topic == "channel/flush":
                        answer = json.dumps(["channel/arrived", body]).encode()
                        one.send(answer)
                    came[topic].append(time.monotonic())


def _obey(ranks: list[Any], came: dict[str, list[float]]) -> None:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    command, *given = json.loads(line)
    if command == "line":
        for one in ranks:
            one.send(json.dumps(["scale/line", [_LINE]]).encode())
        say(posted=True)
    else:  # what has come so far of a topic: how many, and when the last
        times = came[given[0]]
        say(count=len(times), last=max(times, default=0.0))


def _wait(condition: Any) -> None:
    limit = time.monotonic() + _LIMIT
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError
        time.sleep(0.02)


if __name__ == "__main__":
    role, *numbers = sys.argv[1:]
    if role == "main":
        main_rank(int(numbers[0]), numbers[1])
    elif role == "fails":
        failing_rank(int(numbers[0]), int(numbers[1]), *numbers[2:])
    else:
        many_ranks(int(numbers[0]), int(numbers[1]), *numbers[2:])
