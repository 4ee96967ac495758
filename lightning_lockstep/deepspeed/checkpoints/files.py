"""The files of a DeepSpeed checkpoint: where they are, in one folder or in one of each node, and opened together."""

from __future__ import annotations

import filecmp
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_lockstep._settings import did_you_mean
from lightning_lockstep.deepspeed.checkpoints.file_names import (
    check_complete,
    check_kind,
    expected_names,
    is_state_file,
    model_names,
)
from lightning_lockstep.deepspeed.checkpoints.plain_data import read_file
from lightning_lockstep.errors import ConfigurationError

__all__ = ["Checkpoint", "files_of", "is_deepspeed_checkpoint", "read_checkpoint", "read_first"]

_LIGHTNING_TAG = "checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """What the ranks of one run have written at one time, memory-mapped."""

    folder: Path  # of the tag; the first of several
    model_states: Sequence[dict[str, Any]]  # of each rank in stage 3, else of rank 0 alone
    # Of each rank; of none where DeepSpeed keeps the optimizer with the model.
    optimizer_states: Sequence[dict[str, Any]]


def is_deepspeed_checkpoint(path: str | Path) -> bool:
    """Return whether a path is a checkpoint folder that DeepSpeed has written; no file is read."""
    path = Path(path)
    try:
        return path.is_dir() and any(_holds_files(folder) for folder in (path, *_folders(path)))
    except OSError:
        return False


def read_checkpoint(
    folders: Path | Sequence[Path],  # of a checkpoint, or of one tag in it; several: of nodes
    tag: str | None = None,  # by default the one that the file "latest" names
) -> Checkpoint:
    """Open all files of a checkpoint."""
    folder, files = files_of(folders, tag)
    check_kind(folder, files)
    first = _read_any(folder, files)
    models, optimizers = expected_names(folder, files, first)
    check_complete(folder, files, models, optimizers)
    model_states = [read_file(files[name]) for name in models]
    _check_same_run(folder, models, model_states)
    optimizer_states = [read_file(files[name]) for name in optimizers]
    _check_same_step(folder, optimizers, optimizer_states)
    return Checkpoint(folder, model_states, optimizer_states)


def read_first(folders: Path | Sequence[Path], tag: str | None = None) -> dict[str, Any]:
    """Open one file of model states, which says how many ranks have written the checkpoint."""
    folder, files = files_of(folders, tag)
    return _read_any(folder, files)


def files_of(folders: Path | Sequence[Path], tag: str | None = None) -> tuple[Path, dict[str, Path]]:
    """Return the folder that messages name, and where each file of a checkpoint is, by its name."""
    given = [folders] if isinstance(folders, Path) else list(folders)
    found = [_tag_folder(folder, tag) for folder in given]
    files: dict[str, Path] = {}
    for path in (path for folder in found for path in folder.iterdir()):
        before = files.setdefault(path.name, path)
        if before != path and is_state_file(path.name) and not filecmp.cmp(before, path, shallow=False):
            raise ConfigurationError(
                f"{before} and {path} differ: expected the folders of one checkpoint, in which each rank's files are"
                " once. Name the folders that the nodes of one run have written at the same step."
            )
    return found[0], files


def _read_any(folder: Path, files: Mapping[str, Path]) -> dict[str, Any]:
    models = model_names(files)
    if not models:
        raise ConfigurationError(
            f"{folder}: no file of model states is there, such as mp_rank_00_model_states.pt. Rank 0 writes one: name"
            " the folders of all nodes, or bring them together in one."
        )
    return read_file(files[min(models)])


def _tag_folder(folder: Path, tag: str | None) -> Path:
    if not folder.is_dir():
        what = "is a file, which needs no consolidation" if folder.exists() else "does not exist"
        raise ConfigurationError(f"{folder}: {what}. Expected the folder of a DeepSpeed checkpoint.")
    tags = sorted(found.name for found in _folders(folder) if _holds_files(found))
    if tag is not None:
        if tag not in tags:
            raise ConfigurationError(
                f"tag={tag!r}: expected a checkpoint in {folder}, which has {', '.join(tags) or 'none'}."
                + did_you_mean(tag, tags)
            )
        return folder / tag
    if _holds_files(folder):
        return folder
    for candidate in (_latest(folder), _LIGHTNING_TAG):
        if candidate in tags:
            return folder / candidate
    if len(tags) == 1:
        return folder / tags[0]
    if tags:
        raise ConfigurationError(
            f"{folder}: holds several checkpoints. Say which, by tag={tags[-1]!r}: {tags}."
        )
    raise ConfigurationError(
        f"{folder}: is no DeepSpeed checkpoint. Expected a folder such as epoch=1-step=100.ckpt, with a folder"
        f" {_LIGHTNING_TAG!r} in it that holds files such as mp_rank_00_model_states.pt."
    )


def _latest(folder: Path) -> str:
    try:
        return (folder / "latest").read_text().strip()
    except (OSError, ValueError):
        return ""


def _folders(path: Path) -> list[Path]:
    return [found for found in path.iterdir() if found.is_dir()]


def _holds_files(folder: Path) -> bool:
    return any(is_state_file(found.name) for found in folder.iterdir())


def _check_same_run(folder: Path, names: Sequence[str], model_states: Sequence[Mapping[str, Any]]) -> None:
    for name, states in zip(names, model_states, strict=True):
        for key in ("dp_world_size", "global_steps"):
            if states.get(key) != model_states[0].get(key):
                raise ConfigurationError(
                    f"{folder}: its files were written at different times: {key} is {model_states[0].get(key)} in"
                    f" {names[0]} and {states.get(key)} in {name}."
                )


def _check_same_step(folder: Path, names: Sequence[str], states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse optimizer states that have made different numbers of steps, where the optimizer counts them."""
    counts = [_step_counts(one.get("optimizer_state_dict")) for one in states]
    for name, count in zip(names, counts, strict=True):
        if count != counts[0]:
            raise ConfigurationError(
                f"{folder}: its files were written at different times: the optimizer has made {sorted(counts[0])} steps"
                f" in {names[0]} and {sorted(count)} in {name}."
            )


def _step_counts(state: object) -> set[float]:
    """Return the step counts in the state of an optimizer: DeepSpeed's, with that of torch's inside."""
    if not isinstance(state, Mapping):
        return set()
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    kept = inner.get("state", {}) if isinstance(inner, Mapping) else inner
    entries: Iterable[Any] = kept.values() if isinstance(kept, Mapping) else kept or ()
    steps = (entry.get("step") for entry in entries if isinstance(entry, Mapping))
    return {float(step) for step in steps if step is not None}
