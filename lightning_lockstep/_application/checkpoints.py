"""Which checkpoint `ckpt_path` means."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from lightning_lockstep.deepspeed.checkpoints.files import is_deepspeed_checkpoint
from lightning_lockstep.deepspeed.checkpoints.plain_data import read_file
from lightning_lockstep.deepspeed.checkpoints.saving import CONSOLIDATED
from lightning_lockstep.errors import ConfigurationError

_LAST = Path("checkpoints", "last.ckpt")
_BEGUN = ".begun"


def note_begin(run_folder: Path) -> None:
    """Leave a file in a run folder whose time is that at which the first attempt of the run began; on rank 0."""
    with suppress(
        OSError
    ):  # it exists already; or nothing can be written: then only files in the folder are the run's
        (run_folder / _BEGUN).touch(exist_ok=False)


def checkpoint_folders(config: DictConfig, *, run_folder: Path, started_in: Path) -> list[Path]:
    """Return where the components of a run, and Lightning after a signal of Slurm, save checkpoints."""
    parts = [part for group in ("checkpoint", "callbacks") for part in _nodes(config.get(group))]
    given = [OmegaConf.select(part, "dirpath") for part in parts]
    root = OmegaConf.select(config, "trainer.default_root_dir")
    given += [] if root is None else [root, f"{root}/checkpoints"]
    base = run_folder if OmegaConf.select(config, "hydra.job.chdir") else started_in
    return [Path(base, path) for path in given if path is not None and "://" not in str(path)]


def _nodes(group: object) -> Iterable[DictConfig]:
    values = group.values() if isinstance(group, DictConfig) else ()
    return [value for value in values if isinstance(value, DictConfig)]


def find_checkpoint(
    given: str | None, *, run_folder: Path, started_in: Path, folders: Sequence[Path] = ()
) -> str | None:
    """Return the file, or the folder that DeepSpeed has written, that `ckpt_path` means."""
    if given is None or "://" in given:
        return given
    if given == "auto":  # this run's newest from which a fit can go on, if there is one
        found = _newest_of_this_run(run_folder.absolute(), folders)
        return None if found is None else str(found)
    if given == "last":  # the newest last.ckpt of this run folder or of those beside it
        return str(_newest(run_folder))
    path = Path(started_in, given).absolute()
    if path.is_dir() and not is_deepspeed_checkpoint(path):
        path = path / _LAST
    if not (path.is_file() or is_deepspeed_checkpoint(path)):
        raise ConfigurationError(f"ckpt_path={given}: there is no checkpoint {path}")
    return str(path)


def _newest_of_this_run(run_folder: Path, folders: Sequence[Path]) -> Path | None:
    """Return the newest checkpoint of a run from which a fit can go on, of whatever callback, or of a requeue."""
    found = {path for folder in (run_folder / "checkpoints", *folders) for path in folder.glob("*.ckpt")}
    found |= set(run_folder.glob("hpc_ckpt_*.ckpt"))
    ages = {path: path.stat().st_mtime for path in found if _belongs(path, run_folder)}
    return next(filter(_can_be_resumed, sorted(ages, key=ages.__getitem__, reverse=True)), None)


def _belongs(path: Path, run_folder: Path) -> bool:
    """Return whether a checkpoint is this run's: others may save in a folder that is not the run's own."""
    if path.is_relative_to(run_folder):
        return True
    begun = run_folder / _BEGUN
    return begun.exists() and path.stat().st_mtime >= begun.stat().st_mtime


def _can_be_resumed(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, and has more than the weights."""
    if path.name.endswith(CONSOLIDATED):
        return False
    if path.is_dir():
        return is_deepspeed_checkpoint(path)
    if not zipfile.is_zipfile(path):  # torch's files are archives
        return False
    try:
        return "optimizer_states" in read_file(path)
    except ConfigurationError:
        return True  # it holds what only Lightning will say about


def _newest(run_folder: Path) -> Path:
    run_folder = run_folder.absolute()
    # Beside a run lie other runs; beside a job of a sweep lie its other jobs, beside the sweep other sweeps.
    own = run_folder / _LAST
    found = [own] if own.exists() else list(run_folder.parent.glob(f"*/{_LAST}"))
    if not found:
        raise ConfigurationError(
            f"ckpt_path=last: no run under {run_folder.parent} has a {_LAST} yet; name a file or a run folder"
        )
    return max(found, key=lambda path: path.stat().st_mtime)
