"""Tables inside the text of errors."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

__all__ = ["plain_table"]


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an indented table without lines, colours or trailing blanks, as wide as its cells need."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings, box=None, padding=(0, 0, 0, 2), pad_edge=True, header_style="")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=10_000, color_system=None)
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
