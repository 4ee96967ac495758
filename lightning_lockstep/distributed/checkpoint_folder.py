"""A checkpoint folder that ranks write together: whole or not there, and found where a save was killed."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning_lockstep._text import say

#: What is added to the name of a checkpoint while another one takes its place.
BEFORE = ".before"
_MARK = ".lockstep-folder"  # tells a folder from all others, also from those of the same path on other hosts
_Path = TypeVar("_Path", str, Path)


def saved_at(path: _Path, *, says: bool = True) -> _Path:
    """Return where a checkpoint is: aside where a save that was to replace it was killed just then."""
    aside = Path(f"{path}{BEFORE}")
    if Path(path).exists() or not aside.exists():
        return path
    if says:
        say(f"lightning-lockstep: reading {aside}, as a save that was to replace it was killed.")
    return type(path)(aside)


@contextmanager
def whole_folder(
    target: str,  # an address such as s3://... is written to directly
    *,
    rank: int,
    is_first_of_node: bool,  # each node may have its own folder
    meet: Callable[[], object],  # a barrier of all ranks
    gather: Callable[[Any], Sequence[Any]],  # the values of all ranks, on all
) -> Iterator[str]:
    """Give the name of a folder to write into, which takes the place of ``target`` once all ranks have written."""
    # A run that is killed meanwhile leaves the folder that was there before. The nodes find out which of them share the
    # folder before anything is written: afterwards a network file system may answer from a cache. A node that cannot
    # write there raises an OSError on all ranks.
    if "://" in target:
        yield target
        return
    draft = Path(f"{target}.writing")
    if is_first_of_node:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed while it wrote
    meet()
    mark, fault = _marked(draft) if is_first_of_node else ("", "")
    marks, faults = zip(*gather((mark, fault)), strict=True)
    if any(faults):
        raise OSError("; ".join(dict.fromkeys(filter(None, faults))))
    yield str(draft)
    meet()
    is_first_of_folder = is_first_of_node and marks.index(mark) == rank
    if rank == 0:
        _replace(draft, Path(target))
    meet()
    if is_first_of_folder and rank != 0 and draft.is_dir():
        _replace(draft, Path(target))  # on a disk of this node


def _marked(draft: Path) -> tuple[str, str]:
    """Return what tells the folder from those of other nodes, and what went wrong; nothing is raised on one rank."""
    # The first one leaves a file there that the others read. It is made by a link, which a file system makes
    # once for all hosts, whatever they have in their caches; unlike open(), it never shows a file that is still empty.
    own = draft / f"{_MARK}.{uuid.uuid4().hex}"
    try:
        draft.mkdir(parents=True, exist_ok=True)
        own.write_text(own.name)
        try:
            with suppress(FileExistsError):
                os.link(own, draft / _MARK)
            mark = (draft / _MARK).read_text()
        except OSError:
            mark = f"{socket.gethostname()}:{draft}"  # a file system without links
        own.unlink()
        return mark, ""
    except OSError as error:
        return "", str(error)


def _replace(draft: Path, target: Path) -> None:
    (draft / _MARK).unlink(missing_ok=True)
    before = Path(f"{target}{BEFORE}")
    if not target.exists():  # BEFORE is whole then, if it is there
        draft.rename(target)
    elif not _exchange(draft, target):
        _remove(before)
        target.rename(before)
        draft.rename(target)
    _remove(draft)
    _remove(before)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, and return whether the system and its disk can do that."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
