"""A checkpoint folder that is either whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["CONSOLIDATED", "consolidated_name", "whole_folder"]

#: How the name of a plain checkpoint ends that was made of a folder.
CONSOLIDATED = ".consolidated.ckpt"


def consolidated_name(folder: Path) -> Path:
    """Return the file beside a checkpoint folder that its weights go to.

    Args:
        folder: The folder, such as ``last.ckpt``.
    """
    return folder.with_name(folder.name.removesuffix(".ckpt") + CONSOLIDATED)


@contextmanager
def whole_folder(
    target: str, *, is_first: bool, is_first_of_node: bool, meet: Callable[[], object]
) -> Iterator[str]:
    """Give the name of a folder to write into, which takes the place of ``target`` once all ranks have written.

    A run that is killed meanwhile leaves the folder that was there before.

    Args:
        target: The folder; an address such as ``s3://...`` is written to directly.
        is_first: Whether this is rank 0.
        is_first_of_node: Whether this is the first rank of its node, on which a folder may be of its own.
        meet: Waits for all ranks.

    Ranks: all, together; three barriers.
    """
    if "://" in target:
        yield target
        return
    draft = Path(f"{target}.writing")
    if is_first_of_node:
        shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed while it wrote
    meet()
    yield str(draft)
    meet()
    if is_first:
        _replace(draft, Path(target))
    meet()
    if is_first_of_node and not is_first and draft.is_dir():
        _replace(draft, Path(target))  # on a disk of this node


def _replace(draft: Path, target: Path) -> None:
    before = Path(f"{target}.before")
    shutil.rmtree(before, ignore_errors=True)
    if target.exists():
        target.rename(before)
    draft.rename(target)
    if before.is_dir():
        shutil.rmtree(before, ignore_errors=True)
    else:
        before.unlink(missing_ok=True)
