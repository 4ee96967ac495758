"""Run a command on a terminal of 80 columns and say what stands there afterwards, with its colours."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

import lightning_lockstep

COLUMNS, ROWS = 80, 24
START = 300.0  # seconds that a run has to come to where its limit counts from
PATIENCE = 10.0  # seconds that a run has to end in after SIGTERM
_CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07")


@dataclass(frozen=True)
class Shown:
    """What came of a command."""

    # what it printed, a line each, with the colours as ANSI codes; paths of this machine are replaced
    lines: list[str]
    returncode: int | None  # as :class:`subprocess.Popen` has it; ``None`` if it had to be ended
    ended_at: float  # time of its end [s since the epoch]
    obeyed: bool = True  # whether it ended within ``PATIENCE`` of SIGTERM, where it had not ended by itself


def run_in_terminal(
    command: Sequence[str],  # its output goes to a pseudo-terminal, so that programs print as for a person
    *,
    folder: Path,  # the current folder of the command
    limit: float,  # seconds that it may take
    since: Path | None = None,  # A file that the command writes; then the limit counts from there
    environment: Mapping[str, str] | None = None,  # variables to add
) -> Shown:
    """Run a command in a folder until it has ended, or for ``limit`` seconds; no process of it is left."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    # Remarks of Lightning about this machine (srun is installed, ...) are no part of what is shown.
    variables = {"PYTHONPATH": str(Path(lightning_lockstep.__file__).parents[1]), "PYTHONWARNINGS": "ignore"}
    variables |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), **(environment or {})}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    printed = bytearray()
    try:
        ended = _read(ours, process, printed, limit, since)
        at, obeyed = time.time(), True
        if not ended:
            process.terminate()
            obeyed = _read(ours, process, printed, PATIENCE)
    finally:
        _end_all(process)
        os.close(ours)
    text = _neutral(printed.decode(errors="replace"), folder)
    return Shown(_lines(text), process.returncode if ended else None, at, obeyed)


def _read(
    terminal: int,
    process: subprocess.Popen[bytes],
    printed: bytearray,
    limit: float,
    since: Path | None = None,
) -> bool:
    """Take what is printed until the process has ended and nothing more comes, or for ``limit`` seconds."""
    begun = None if since else time.monotonic()
    latest = time.monotonic() + START
    while time.monotonic() < (latest if begun is None else begun + limit):
        if begun is None and since is not None and since.exists():
            begun = time.monotonic()
        ended = process.poll() is not None
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                printed += os.read(terminal, 65536)
            except OSError:  # nobody has the other end any more
                return process.wait() is not None
        elif ended:
            return True
    return False


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the session that the process was started in."""
    for other in psutil.process_iter():
        with suppress(ProcessLookupError, PermissionError, psutil.Error):
            if os.getsid(other.pid) == process.pid:
                other.kill()
    process.wait()


def _neutral(text: str, folder: Path) -> str:
    packages = "/home/me/env/lib/python/site-packages"
    text = re.sub(re.escape(sys.prefix) + r"/lib/python[\d.]+/site-packages", packages, text)
    for place, name in [
        (str(folder), "/home/me/project"),
        (sys.prefix, "/home/me/env"),
        (str(Path(lightning_lockstep.__file__).parents[1]), packages),
        (sys.base_prefix, "/usr"),
        (str(Path.home()), "/home/me"),
    ]:
        text = re.sub(rf"{re.escape(place)}(?=[/\s\"',:;)]|$)", name, text)
    return text


def _lines(text: str) -> list[str]:
    """What a terminal shows for a text: of the codes that move the cursor, those that rich and tqdm use."""
    rows: list[list[tuple[str, str]]] = [[]]  # a character and the codes of its colour
    row = column = at = 0
    style = ""
    while at < len(text):
        if code := _CONTROL.match(text, at):
            at, number = code.end(), int(code[1]) if (code[1] or "").isdigit() else 0
            if code[2] == "m":
                style = "" if code[1] in ("", "0") else style + code[0]
            elif code[2] == "A":
                row = max(0, row - max(1, number))
            elif code[2] == "K":
                rows[row][0 if number == 2 else column :] = []
            continue
        character, at = text[at], at + 1
        if character == "\n":
            row += 1
            if row == len(rows):
                rows.append([])
        elif character == "\r":
            column = 0
        elif character >= " ":
            rows[row] += [(" ", "")] * (column - len(rows[row]))
            rows[row][column : column + 1] = [(character, style)]
            column += 1
    return ["".join(_coloured(one)) for one in rows]


def _coloured(cells: Sequence[tuple[str, str]]) -> list[str]:
    parts, before = [], ""
    for character, style in cells:
        if style != before:
            parts.append(f"\x1b[0m{style}")
            before = style
        parts.append(character)
    return [*parts, "\x1b[0m"] if before else parts


def without_colours(line: str) -> str:
    """The characters of a line alone."""
    return _CONTROL.sub("", line)
