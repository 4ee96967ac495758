"""Which checkpoint `ckpt_path` means."""

from __future__ import annotations

import zipfile
from pathlib import Path

from lightning_lockstep.errors import ConfigurationError

_LAST = Path("checkpoints", "last.ckpt")


def find_checkpoint(given: str | None, *, run_folder: Path, started_in: Path) -> str | None:
    """Return the file that `ckpt_path` means.

    Args:
        given: `None`, a file, a run folder, an address such as `s3://...`, `auto` for the newest checkpoint of this
            run folder, if there is one, or `last` for the newest `last.ckpt` of this run folder or of those beside it.
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
    if path.is_dir():
        path = path / _LAST
    if not path.is_file():
        raise ConfigurationError(f"ckpt_path={given}: there is no file {path}")
    return str(path)


def _newest_of_this_run(run_folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a run, of whatever callback, or that of a requeue by Slurm."""
    found = [*run_folder.glob("checkpoints/*.ckpt"), *run_folder.glob("hpc_ckpt_*.ckpt")]
    # One that was being written when the run was killed is no zip archive, which torch's files are.
    whole = [path for path in found if zipfile.is_zipfile(path)]
    return max(whole, key=lambda path: path.stat().st_mtime, default=None)


def _newest(run_folder: Path) -> Path:
    run_folder = run_folder.absolute()
    # Beside a run lie other runs; beside a job of a sweep lie its other jobs, beside the sweep other sweeps.
    found = (
        [run_folder / _LAST] if (run_folder / _LAST).is_file() else list(run_folder.parent.glob(f"*/{_LAST}"))
    )
    if not found:
        raise ConfigurationError(
            f"ckpt_path=last: no run under {run_folder.parent} has a {_LAST} yet; name a file or a run folder"
        )
    return max(found, key=lambda path: path.stat().st_mtime)
