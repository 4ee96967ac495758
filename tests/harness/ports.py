"""A rendezvous port that nobody else takes while a test runs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Below the kernel's ephemeral range (32768 up on Linux), so that no outgoing connection and no bind to
# port 0 can take a port between choosing it and using it.
_RANGE = range(20_000, 32_000)


@contextlib.contextmanager
def reserve_port() -> Iterator[int]:
    """Yield a free TCP port, kept from other users of this function by a file lock until the block ends."""
    folder = Path(tempfile.gettempdir()) / f"lockstep-test-ports.{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Seeded from the system: forked processes must not draw the same numbers.
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.choice(_RANGE)
        with open(folder / str(port), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            if not _can_bind(port):
                continue
            yield port
            return
    raise RuntimeError("no free port found in 200 attempts")


def _can_bind(port: int) -> bool:
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=dual).close()
    except OSError:
        return False
    return True
