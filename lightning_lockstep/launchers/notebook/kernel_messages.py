"""Pictures, tables and widgets that a rank displays: sent by the kernel, since a copy of it may not send.

A rank of a notebook is a fork of the kernel. IPython's ``display``, matplotlib's ``show`` and widgets go through the
kernel's session, which sends nothing from a fork. Their messages go into a file of the rank instead, and the kernel
sends them as its own, in the cell that has started the ranks.
"""

from __future__ import annotations

import builtins
import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["MessageReader", "divert_messages", "forward_message", "in_kernel"]

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
