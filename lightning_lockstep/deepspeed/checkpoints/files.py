"""The files of a checkpoint opened together, read as plain data, and a plain file written."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_lockstep.deepspeed.checkpoints.file_names import CheckpointFolder, is_state_file
from lightning_lockstep.distributed.plain_data import UNREADABLE, read_plain
from lightning_lockstep.distributed.sharded_state import is_parts_folder
from lightning_lockstep.errors import ConfigurationError

# -- What a file of DeepSpeed holds, read as plain data --
# DeepSpeed writes pickles that name its own classes, and those of whatever the run had in its state. They are read
# without any of these classes, so DeepSpeed need not be installed, and a file that is not trusted runs no code.


def read_file(path: Path) -> dict[str, Any]:
    """Return what ``torch.save`` has written into a file, tensors memory-mapped and other objects inert."""
    try:
        content = read_plain(path)
    except ConfigurationError:
        raise
    except UNREADABLE as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0].strip()
        raise ConfigurationError(
            f"{path}: cannot be read ({reason or type(error).__name__}). Expected a whole file of DeepSpeed: a full"
            " disk or a copy may have cut it off."
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: expected a dictionary, found {type(content).__name__}.")
    return content


# -- One file written whole or not at all --


def save(content: dict[str, Any], output: Path) -> None:
    """Write a checkpoint into a file next to ``output``, which takes its place when all is written."""
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


# -- The files of a DeepSpeed checkpoint: where they are, in one folder or in one of each node, and opened together --

# The folder in that of a checkpoint which Lightning lets DeepSpeed write to.
_LIGHTNING_TAG = "checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """What the ranks of one run have written at one time, memory-mapped."""

    folder: Path  # of the tag; the first of several
    model_states: Sequence[dict[str, Any]]  # of each rank in stage 3, else of rank 0 alone
    # Of DeepSpeed's optimizer on each rank; of none in stage 0, where it is with the model.
    optimizer_states: Sequence[dict[str, Any]]

    @property
    def is_divided(self) -> bool:
        """Whether it is of stage 3, in which every rank has a part of each parameter."""
        return bool(self.optimizer_states) and "fp32_flat_groups" in self.optimizer_states[0]


def is_deepspeed_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint folder that DeepSpeed has written; no file is read."""
    try:
        return _folder_with_files(Path(path)) is not None
    except OSError:
        return False


def is_checkpoint_folder(path: str | Path) -> bool:
    """Return whether a path is a checkpoint folder, of DeepSpeed or with the parts of a model divided by torch."""
    return is_parts_folder(path) or is_deepspeed_checkpoint(path)


def read_checkpoint(folders: str | Path | Sequence[Path]) -> Checkpoint:
    """Open all files of a checkpoint, by its folder or that of a tag in it, or the folders of several nodes."""
    folder = find_folder(folders)
    folder.check_kind()
    models, optimizers = folder.expected_names(read_file(folder.model_file()))
    folder.check_complete(models, optimizers)
    model_states = [read_file(folder.files[name]) for name in models]
    for key in ("dp_world_size", "global_steps"):
        _check_same(folder.path, key, models, [states.get(key) for states in model_states])
    states = [read_file(folder.files[name]).get("optimizer_state_dict", {}) for name in optimizers]
    counts = [_step_counts(one) for one in states]
    _check_same(folder.path, "the optimizer's number of steps", optimizers, counts)
    return Checkpoint(folder.path, model_states, states)


def find_folder(folders: str | Path | Sequence[Path]) -> CheckpointFolder:
    """Return where the files of a checkpoint are."""
    given = [Path(folders)] if isinstance(folders, (str, Path)) else folders
    found = [_tag_folder(folder) for folder in given]
    files: dict[str, Path] = {}
    for path in (path for folder in found for path in folder.iterdir()):
        before = files.setdefault(path.name, path)
        if before != path and is_state_file(path.name) and not filecmp.cmp(before, path, shallow=False):
            raise ConfigurationError(
                f"{before} and {path} differ: expected the folders of one checkpoint, with one copy of each rank's"
                " files. Name the folders that the nodes of one run have written at the same step."
            )
    return CheckpointFolder(found[0], files)


def _tag_folder(folder: Path) -> Path:
    if not folder.is_dir():
        what = "is a file, which needs no consolidation" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{folder}: {what}. Expected the folder of a DeepSpeed checkpoint.")
    if (found := _folder_with_files(folder)) is not None:
        return found
    raise ConfigurationError(
        f"{folder}: is not a DeepSpeed checkpoint. Expected a folder such as epoch=1-step=100.ckpt, with a folder"
        f" {_LIGHTNING_TAG!r} in it that holds files such as mp_rank_00_model_states.pt."
    )


def _folder_with_files(folder: Path) -> Path | None:
    """Return a folder, or the one in it that was written last."""
    latest = folder / "latest"  # a file of DeepSpeed's with the name of that folder
    tag = latest.read_text(errors="replace").strip() if latest.is_file() else _LIGHTNING_TAG
    for found in (folder, folder / tag):
        if found.is_dir() and any(is_state_file(file.name) for file in found.iterdir()):
            return found
    return None


def _check_same(folder: Path, what: str, names: Sequence[str], found: Sequence[Any]) -> None:
    """Refuse files of different saves, by what they say."""
    for name, one in zip(names, found, strict=True):
        if one != found[0]:
            raise ConfigurationError(
                f"{folder}: expected the files of one save, but {what} is {found[0]} in {names[0]} and {one} in {name}."
            )


def _step_counts(state: Mapping[str, Any]) -> Any:
    """Return the step counts in the state of an optimizer, which has that of torch's inside, or one for all."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    kept = inner.get("state", {}) if isinstance(inner, Mapping) else {}
    counts = {float(entry["step"]) for entry in kept.values() if entry.get("step") is not None}
    return counts.pop() if len(counts) == 1 else sorted(counts)
