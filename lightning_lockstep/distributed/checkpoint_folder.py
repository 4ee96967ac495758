"""A checkpoint folder that ranks write together: whole or not there, and found after a save was killed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lightning_lockstep._text import say

#: What is added to the name of a checkpoint while another one takes its place.
BEFORE = ".before"
#: What StopTogether leaves beside its checkpoint: that all ranks have left together, and why.
PREEMPTED_FILE = "preempted.json"
_Path = TypeVar("_Path", str, Path)


def saved_at(path: _Path, *, says: bool = True) -> _Path:
    """Return where a checkpoint is: under its other name if a save that was to replace it was killed just then."""
    aside = Path(f"{path}{BEFORE}")
    if Path(path).exists() or not aside.exists():
        return path
    if says:
        say(f"lightning-lockstep: reading {aside}, because the save that should have replaced it was killed.")
    return type(path)(aside)


@contextmanager
def whole_folder(
    strategy: Any,
    target: str,  # an address such as s3://... is written to directly
    gather: Callable[[Any], Sequence[Any]],  # the values of all ranks, on all
    *,
    on_each_node: bool = False,  # the nodes write to disks of their own
) -> Iterator[str]:
    """Give a folder to write into, which takes the place of ``target`` once all have written. Ranks: all, together."""
    # A run that is killed meanwhile leaves the folder of before. A node that cannot write there raises on all ranks.
    if "://" in target:
        yield target
        return
    draft = Path(f"{target}.writing")
    makes_folder = strategy.global_rank == 0 or (on_each_node and strategy.local_rank == 0)
    faults = list(filter(None, gather(_made_anew(draft) if makes_folder else "")))
    if faults:
        raise OSError("; ".join(dict.fromkeys(faults)))
    yield str(draft)
    _meet(strategy)
    if makes_folder:
        before = Path(f"{target}{BEFORE}")
        if Path(target).exists():  # else BEFORE is whole, if it is there
            _remove(before)
            Path(target).rename(before)
        draft.rename(target)
        _remove(before)
    _meet(strategy)


def _meet(strategy: Any) -> None:
    strategy.barrier()
    strategy.check_failure()  # a barrier does not wait once a rank has failed


def _made_anew(draft: Path) -> str:
    """Make an empty folder, and return what went wrong; nothing is raised on one rank."""
    shutil.rmtree(draft, ignore_errors=True)  # of a run that was killed while it wrote
    try:
        draft.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    return ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
