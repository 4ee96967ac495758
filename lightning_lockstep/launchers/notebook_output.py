"""What ranks of a notebook print, brought to the cell that started them."""

from __future__ import annotations

import builtins
import codecs
import io
import json
import os
import re
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from lightning_lockstep.launchers.rank_supervisor import become_rank

# -- Pictures, tables and widgets that a rank displays: sent by the kernel, since a copy of it may not send
# A rank of a notebook is a fork of the kernel. IPython's ``display``, matplotlib's ``show`` and widgets go
# through the kernel's session, which sends nothing from a fork. Their messages go into a file of the rank
# instead, and the kernel sends them as its own, in the cell that has started the ranks.

# What a rank may send; replies to the frontend are the kernel's own.
_SENT = ("display_data", "update_display_data", "clear_output", "comm_open", "comm_msg", "comm_close")


def divert_messages(path: Path) -> None:
    """Have what this process displays go into a file; without an IPython kernel nothing is done."""
    kernel = _kernel()
    if kernel is None:
        return
    file = path.open("ab", buffering=0)

    def send(
        stream: Any, message: Any, content: Any = None, *_: Any, buffers: Any = None, **options: Any
    ) -> None:
        kind = message if isinstance(message, str) else message.get("header", {}).get("msg_type", "")
        if kind not in _SENT:
            return
        if not isinstance(message, str):
            content, options = message.get("content"), {**options, "metadata": message.get("metadata")}
            buffers = buffers or message.get("buffers")
        sent = {
            "kind": kind,
            "content": content or {},
            "metadata": options.get("metadata") or {},
            "topic": _text(options.get("ident")),
            "buffers": [b64encode(bytes(buffer)).decode() for buffer in buffers or ()],
        }
        file.write(json.dumps(sent, default=str).encode() + b"\n")

    kernel.session.send = send
    vars(builtins)["input"] = _refuse_input


def _refuse_input(prompt: object = "") -> str:
    """Raise, since the answer would come to the kernel and this rank would wait for ever."""
    raise EOFError(
        f"input({prompt!r}) was called in a rank of a notebook, where nobody can answer: ask in a cell."
    )


class MessageReader:
    """Reads the messages of one rank."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._begun = file, b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that have come since the last call."""
        *lines, self._begun = (self._begun + self._file.read()).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def close(self) -> None:
        self._file.close()


def forward_message(message: dict[str, Any]) -> None:
    """Send a message of a rank as one of this kernel."""
    kernel = _kernel()
    if kernel is None:
        return
    kernel.session.send(
        kernel.iopub_socket,
        message["kind"],
        message["content"],
        parent=kernel.get_parent("shell") if hasattr(kernel, "get_parent") else {},
        ident=(message["topic"] or "").encode() or None,
        metadata=message["metadata"],
        buffers=[b64decode(buffer) for buffer in message["buffers"]],
    )


def in_kernel() -> bool:
    """Return whether this process is a kernel of IPython, or a rank that was forked from one."""
    return _kernel() is not None


def _text(topic: Any) -> str:
    first = topic[0] if isinstance(topic, (list, tuple)) and topic else topic
    return first.decode(errors="replace") if isinstance(first, bytes) else str(first or "")


def _kernel() -> Any:
    """Return the kernel of IPython that this process runs, or ``None``."""
    if "ipykernel" not in sys.modules or "IPython" not in sys.modules:
        return None
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None)


# -- What the ranks of a notebook print, shown in the cell in the order of the ranks --
# Each rank writes into files of its own, so it never waits for the kernel, and what it had written is there
# after it was killed. The kernel shows rank 0 as it goes. What the others print is kept until all ranks
# before them have ended, and carries their number.

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


# -- What a process does first that was just forked from the kernel of a notebook to be a rank --

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_VICTIM = "500"


def begin_rank(rank: int, folder: Path) -> None:
    """Leave to the kernel what is the kernel's: its signals, its connection with the notebook, its life."""
    signal.set_wakeup_fd(-1)  # what signals write there goes to the kernel's event loop
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become_rank(rank)
    write_into(folder, rank)
    with suppress(OSError):  # should memory run out, the operating system is to end this rank, not the kernel
        _OOM_SCORE.write_text(_VICTIM)
