"""What the ranks of a notebook print, shown in the cell in the order of the ranks.

Each rank writes into files of its own, so it never waits for the kernel, and what it had written is there after it was
killed. The kernel shows rank 0 as it goes. What the others print is kept until all ranks before them have ended, and
carries their number.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lightning_lockstep.launchers.notebook.kernel_messages import (
    MessageReader,
    divert_messages,
    forward_message,
)

__all__ = ["RankOutput", "write_into"]

_STREAMS = ("stdout", "stderr")
_LINE_START = re.compile(r"(?:^|(?<=[\n\r]))(?=[^\n\r])")


class RankOutput:
    """Shows in the cell what the ranks write."""

    def __init__(self, folder: Path, world_size: int, *, has_ended: Callable[[int], bool]) -> None:
        self._ranks = [_OutputOfRank(folder, rank) for rank in range(world_size)]
        self._has_ended = has_ended
        self._shown = 0  # the rank that is shown as it goes

    def show(self) -> None:
        """Show what has come: of the first rank that still runs, and of all before it the rest."""
        while self._shown < len(self._ranks):
            ended = self._has_ended(self._shown)  # asked first: what it wrote before it ended is then there
            self._ranks[self._shown].show()
            if not ended:
                break
            self._ranks[self._shown].close()
            self._shown += 1
        for rank in self._ranks[self._shown + 1 :]:
            rank.collect()

    def __enter__(self) -> RankOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Show all that is left, of ranks that were killed too."""
        for rank in self._ranks[self._shown :]:
            rank.show()
            rank.close()
        self._shown = len(self._ranks)


class _OutputOfRank:
    """Reads what one rank writes, in the order in which it comes, and shows it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._prefix = f"[rank {rank}] " if rank else ""
        self._files = {name: _open_empty(folder / f"{rank}.{name}") for name in _STREAMS}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in _STREAMS}
        self._messages = MessageReader(_open_empty(folder / f"{rank}.messages"))
        self._kept: list[tuple[str, Any]] = []
        self._line_begun = dict.fromkeys(_STREAMS, False)

    def collect(self) -> None:
        """Read what has come and keep it."""
        for name, file in self._files.items():
            text = self._decoders[name].decode(file.read())
            if text:
                self._kept.append((name, text))
        self._kept += [("message", message) for message in self._messages.read()]

    def show(self) -> None:
        """Read what has come, and show that and what was kept."""
        self.collect()
        kept, self._kept = self._kept, []
        for name, content in kept:
            if name == "message":
                forward_message(content)
            else:
                stream = getattr(sys, name)
                stream.write(self._prefixed(name, content))
                stream.flush()

    def close(self) -> None:
        """Close the files; a last line without an end gets one."""
        for name, file in self._files.items():
            file.close()
            if self._prefix and self._line_begun[name]:
                getattr(sys, name).write("\n")
        self._messages.close()

    def _prefixed(self, name: str, text: str) -> str:
        if not self._prefix:
            return text
        goes_on, self._line_begun[name] = self._line_begun[name], not text.endswith(("\n", "\r"))
        prefixed = _LINE_START.sub(self._prefix, text)
        return prefixed.removeprefix(self._prefix) if goes_on else prefixed


def write_into(folder: Path, rank: int) -> None:
    """Have all that this process writes go into the files of its rank, what compiled code prints included."""
    for descriptor, name in enumerate(_STREAMS, 1):
        file = os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_APPEND)
        with suppress(OSError):
            os.dup2(file, descriptor)
        raw = io.FileIO(file, "w")
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
        # Handlers of loggers hold the stream of the kernel, which would send what they write to the cell at once.
        before = getattr(sys, name)
        for method in ("write", "writelines", "flush"):
            with suppress(AttributeError):
                setattr(before, method, getattr(stream, method))
        setattr(sys, name, stream)
    divert_messages(folder / f"{rank}.messages")


def _open_empty(path: Path) -> BinaryIO:
    path.touch()
    return path.open("rb")
