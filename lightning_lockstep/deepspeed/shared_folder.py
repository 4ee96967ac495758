"""Which ranks see one and the same folder: those of a node, and those of several on a common file system."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from pathlib import Path

__all__ = ["forget_mark", "mark_of"]

_MARK = ".lockstep-folder"


def mark_of(folder: Path) -> str:
    """Return what tells this folder from all others, also from those of the same path on other hosts.

    The first one leaves a file there that the others read. It is made by a link, which a file system makes once for all
    hosts, whatever they have in their caches.
    """
    mark = folder / _MARK
    own = folder / f"{_MARK}.{uuid.uuid4().hex}"
    own.write_text(own.name)
    try:
        with suppress(FileExistsError):
            os.link(own, mark)  # unlike open(), it never shows a file that is still empty
        return mark.read_text()
    except OSError:
        return f"{socket.gethostname()}:{folder}"  # a file system without links
    finally:
        own.unlink()


def forget_mark(folder: Path) -> None:
    """Remove what :func:`mark_of` has left."""
    (folder / _MARK).unlink(missing_ok=True)
