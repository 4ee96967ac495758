"""Which checkpoint `ckpt_path` means."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lightning_lockstep.deepspeed.checkpoints.files import is_deepspeed_checkpoint
from lightning_lockstep.deepspeed.checkpoints.saving import CONSOLIDATED
from lightning_lockstep.errors import ConfigurationError

_LAST = Path("checkpoints", "last.ckpt")


def find_checkpoint(given: str | None, *, run_folder: Path, started_in: Path) -> str | None:
    """Return the file, or the folder that DeepSpeed has written, that `ckpt_path` means.

    Args:
        given: `None`, a checkpoint, a run folder, an address such as `s3://...`, `auto` for the newest checkpoint of
            this run folder, if there is one, or `last` for the newest `last.ckpt` of this run folder or of those
            beside it.
        run_folder: Folder of the run that begins.
        started_in: Folder that relative paths are relative to.

    Raises:
        ConfigurationError: There is no such file.

    Ranks: rank 0 only, for all.
    """
    if given is None or "://" in given:
        return given
    if given == "auto":
        found = _newest_of_this_run(run_folder.absolute())
        return None if found is None else str(found)
    if given == "last":
        return str(_newest(run_folder))
    path = Path(started_in, given).absolute()
    if path.is_dir() and not is_deepspeed_checkpoint(path):
        path = path / _LAST
    if not (path.is_file() or is_deepspeed_checkpoint(path)):
        raise ConfigurationError(f"ckpt_path={given}: there is no checkpoint {path}")
    return str(path)


def _newest_of_this_run(run_folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run, of whatever callback, or that of a requeue by Slurm."""
    found = [*run_folder.glob("checkpoints/*.ckpt"), *run_folder.glob("hpc_ckpt_*.ckpt")]
    found = [path for path in found if not path.name.endswith(CONSOLIDATED)]  # which have no optimizer state
    return max(filter(_is_whole, found), key=lambda path: path.stat().st_mtime, default=None)


def _is_whole(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, rather than that the run was killed meanwhile."""
    return (
        is_deepspeed_checkpoint(path) if path.is_dir() else zipfile.is_zipfile(path)
    )  # torch's files are archives


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
