"""Ranks that are forks of a notebook's kernel: what must hold before, and what they print, brought to the cell."""

from __future__ import annotations

import builtins
import codecs
import ctypes
import gc
import io
import json
import os
import re
import signal
import sys
from base64 import b64decode, b64encode
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import torch

from lightning_lockstep.distributed import shut_down
from lightning_lockstep.distributed.failure.exit_notes import parent_reads_notes
from lightning_lockstep.distributed.process_group import (
    current_group,
    forget_rendezvous,
    process_group_exists,
)
from lightning_lockstep.errors import LaunchError

# -- What is checked and put in order in the kernel of a notebook before its process is forked into ranks
# A fork copies memory, not threads. Whatever starts threads must not have been started, or
# must be stopped before: CUDA cannot, XLA cannot, OpenMP can.

_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5: end the threads, keep nothing


def check_kernel() -> None:
    """Refuse to fork a kernel whose copies could not work."""
    if parent_reads_notes():
        raise LaunchError(
            "Ranks were to be started inside a rank that a notebook has started: expected a call in a cell. Inside a"
            " rank make a Trainer with as many devices as there are ranks; it uses the ranks that are there."
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise LaunchError(
            "CUDA was already used in this kernel, so it would not work in ranks that are forked from it: expected no"
            " call of torch.cuda, no tensor and no model on a GPU in any cell before. Restart the kernel, run the"
            " cells that need no GPU, and do the rest inside the function that the ranks run."
        )
    group = current_group()
    if process_group_exists() and group is not None and group.world_size > 1:
        raise LaunchError(
            f"This kernel is itself rank {group.rank} of {group.world_size} connected ranks: expected a kernel that is"
            " connected with none. Call torch.distributed.destroy_process_group() first, or restart the kernel."
        )


def leave_group_of_one() -> None:
    """Forget where an earlier Trainer of one rank, this process, has met nobody."""
    if process_group_exists():
        shut_down(destroy_process_group=True)
        gc.collect()
        forget_rendezvous()


def prepare_fork() -> None:
    """Stop what would not survive the fork and can be started again on both sides."""
    leave_group_of_one()
    _end_openmp_threads()
    for stream in (sys.stdout, sys.stderr):  # what is buffered would be written by every rank too
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _end_openmp_threads() -> None:
    """End the threads of GNU OpenMP, which starts new ones when it needs them."""
    # After a fork its record of them is there, the threads are not, and the first operation that wants to
    # work on several cores waits for them forever. The libraries of Intel and LLVM look after this
    # themselves.
    loaded: list[Any] = []
    with suppress(psutil.Error, OSError, AttributeError):  # psutil has maps of memory on Linux
        loaded = psutil.Process().memory_maps()
    for path in {library.path for library in loaded if Path(library.path).name.startswith("libgomp")}:
        with suppress(OSError, AttributeError):  # of several, an old one cannot
            ctypes.CDLL(path).omp_pause_resource_all(_PAUSE_HARD)


# -- Pictures, tables and widgets that a rank displays: sent by the kernel, since a copy of it may not send
# A rank of a notebook is a fork of the kernel. IPython's ``display``, matplotlib's ``show`` and widgets go
# through the kernel's session, which sends nothing from a fork. Their messages go into a file of the rank
# instead, and the kernel sends them as its own, in the cell that has started the ranks.

# What a rank may send; replies to the frontend are the kernel's own.
_SENT = ("display_data", "update_display_data", "clear_output", "comm_open", "comm_msg", "comm_close")


def _divert_messages(path: Path) -> None:
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
    """Raise, since the answer would come to the kernel and this rank would wait forever."""
    raise EOFError(
        f"input({prompt!r}) was called in a rank of a notebook, where nobody can answer: ask in a cell."
    )


def _forward_message(message: dict[str, Any]) -> None:
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
# Each rank writes into its own files, so it never waits for the kernel, and what it had written is there
# after it was killed. The kernel shows rank 0 as it goes. What the others print is kept until all ranks
# before them have ended, and carries their number.

_STREAMS = ("stdout", "stderr")
_MESSAGES = "messages"
_LINE_START = re.compile(r"(?:^|(?<=[\n\r]))(?=[^\n\r])")


class RankOutput:
    """Shows in the cell what the ranks write."""

    def __init__(self, folder: Path, number: int) -> None:
        self._ranks = [_OutputOfRank(folder, rank) for rank in range(number)]
        self._shown = 0  # the rank that is shown as it goes

    def show(self, running: Collection[int] = ()) -> None:
        """Show what has come: of the first rank that still runs, and of all before it the rest."""
        # Whoever ran is known from before: what a rank wrote until it ended is then there.
        while self._shown < len(self._ranks):
            self._ranks[self._shown].show()
            if self._shown in running:
                break
            self._ranks[self._shown].close()
            self._shown += 1
        for rank in self._ranks[self._shown + 1 :]:
            rank.collect()

    def close(self) -> None:
        """Show all that is left, of ranks that were killed too."""
        self.show()


class _OutputOfRank:
    """Reads what one rank writes, in the order in which it comes, and shows it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._prefix = f"[rank {rank}] " if rank else ""
        self._files = {name: _open_empty(folder / f"{rank}.{name}") for name in (*_STREAMS, _MESSAGES)}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in self._files}
        self._kept: list[tuple[str, str]] = []
        self._message = ""  # as much of the last one as has come
        self._line_begun = dict.fromkeys(_STREAMS, False)

    def collect(self) -> None:
        """Read what has come and keep it."""
        for name, file in self._files.items():
            if text := self._decoders[name].decode(file.read()):
                self._kept.append((name, text))

    def show(self) -> None:
        """Read what has come, and show that and what was kept."""
        self.collect()
        kept, self._kept = self._kept, []
        for name, text in kept:
            if name == _MESSAGES:
                *messages, self._message = (self._message + text).split("\n")
                for message in messages:
                    _forward_message(json.loads(message))
            else:
                stream = getattr(sys, name)
                stream.write(self._prefixed(name, text))
                stream.flush()

    def close(self) -> None:
        """Close the files; a last line without an end gets one."""
        for name, file in self._files.items():
            file.close()
            if self._prefix and self._line_begun.get(name):
                getattr(sys, name).write("\n")

    def _prefixed(self, name: str, text: str) -> str:
        if not self._prefix:
            return text
        goes_on, self._line_begun[name] = self._line_begun[name], not text.endswith(("\n", "\r"))
        prefixed = _LINE_START.sub(self._prefix, text)
        return prefixed.removeprefix(self._prefix) if goes_on else prefixed


def _write_into(folder: Path, rank: int) -> None:
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
    _divert_messages(folder / f"{rank}.{_MESSAGES}")


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
    _write_into(folder, rank)
    with suppress(OSError):  # should memory run out, the operating system is to end this rank, not the kernel
        _OOM_SCORE.write_text(_VICTIM)
