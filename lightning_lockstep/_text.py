"""Text of messages: figures, plurals, lists, nearest names, tables; and what is printed to standard error."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

# -- Figures, lists and errors as they stand in messages: one spelling of each in the whole package --


def counted(number: int, what: str, plural: str = "") -> str:
    """Return a number of things: ``1 rank``, ``2 ranks``, ``0 batches``, ``1,654 samples``."""
    return f"{number:,} {what if number == 1 else plural or f'{what}s'}"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers in short, in rising order: ``3``, ``0-7``, ``0-2,5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as a subject: ``rank 3``, ``ranks 0-7``, ``ranks 0-2,5``."""
    different = set(ranks)
    return f"{'rank' if len(different) == 1 else 'ranks'} {ranges(different)}"


def size_in_words(size: float | None) -> str:
    """Return a number of bytes with three digits, such as ``1.50 GiB``; a dash for ``None``."""
    if size is None:
        return "-"
    for unit, length in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= length:
            value = size / length
            digits = 0 if unit != "GiB" or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{size:.0f} B"


def time_in_words(seconds: float) -> str:
    """Return a time [s] in about two digits: ``40 us``, ``1.8 ms``, ``3.5 s``, ``12 s``, ``3 min``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    if seconds >= 1:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def listed(texts: Sequence[str], most: int) -> str:
    """Return the first of ``texts`` with commas between them, and how many more there are."""
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


#: What pip is given in place of the name of this package, which is on no registry yet: the folder of a clone.
PACKAGE = "."


def install_command(extra: str = "", *others: str) -> str:
    """Return the line that installs this package, with an extra of it and other packages if given."""
    where = "  # in a clone of lightning-lockstep" if PACKAGE == "." else ""
    return " ".join(["pip install", f"'{PACKAGE}[{extra}]'" if extra else PACKAGE, *others]) + where


def first_line(said: BaseException | str) -> str:
    """Return the first line of a text or error message that is not blank; of an empty error its type."""
    lines = (line.strip() for line in str(said).splitlines())
    return next((line for line in lines if line), "" if isinstance(said, str) else type(said).__name__)


#: How the last line of a failed run begins, which names the file in which the failure is kept.
SAVED = "Saved to "


def exit_in_words(returncode: int) -> str:  # of Popen: negative for a signal
    """Return how a process ended: ``exit code 1``, ``killed by SIGKILL``."""
    if returncode >= 0:
        return f"exit code {returncode}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-returncode).name}"
    return f"killed by signal {-returncode}"


# -- Tables inside the text of messages --


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an indented table without lines, colours or trailing blanks, as wide as its cells need."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, padding=(0, 0, 0, 2), pad_edge=True, header_style="")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    # Text in a notebook too: a rank that is a fork of its kernel cannot send it anything else.
    console = Console(file=io.StringIO(), width=10_000, color_system=None, force_jupyter=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


# -- What this package prints to the standard error stream, where progress bars live too --


def say(text: str) -> None:
    """Print ``text`` in one piece; what a closed, full or broken stream does not take is dropped, with no error."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text if text.endswith("\n") else f"{text}\n")
        sys.stderr.flush()
