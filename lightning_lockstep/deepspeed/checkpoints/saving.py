"""A checkpoint folder that is either whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_lockstep.deepspeed.shared_folder import forget_mark, mark_of

__all__ = ["CONSOLIDATED", "consolidated_name", "whole_folder"]

#: How the name of a plain checkpoint ends that was made of a folder.
CONSOLIDATED = ".consolidated.ckpt"


def consolidated_name(folder: Path) -> Path:
    """Return the file beside a checkpoint folder that its weights go to."""
    return folder.with_name(folder.name.removesuffix(".ckpt") + CONSOLIDATED)


@contextmanager
def whole_folder(
    target: str,  # an address such as s3://... is written to directly
    *,
    rank: int,
    is_first_of_node: bool,  # a node may have a folder of its own
    meet: Callable[[], object],  # a barrier of all ranks
    gather: Callable[[Any], Sequence[Any]],  # the values of all ranks, on all
) -> Iterator[str]:
    """Give the name of a folder to write into, which takes the place of ``target`` once all ranks have written.

    A run that is killed meanwhile leaves the folder that was there before. The nodes find out which of them
    share the folder before anything is written: whether it is still there afterwards, a network file system
    may answer from a cache. A node that cannot write there raises an OSError on all ranks.
    """
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
    try:
        draft.mkdir(parents=True, exist_ok=True)
        return mark_of(draft), ""
    except OSError as error:
        return "", str(error)


def _replace(draft: Path, target: Path) -> None:
    forget_mark(draft)
    before = Path(f"{target}.before")
    shutil.rmtree(before, ignore_errors=True)
    if target.exists():
        target.rename(before)
    draft.rename(target)
    if before.is_dir():
        shutil.rmtree(before, ignore_errors=True)
    else:
        before.unlink(missing_ok=True)
