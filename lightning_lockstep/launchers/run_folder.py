"""The folder of a run: made for this run alone, and found again by a later attempt of the same run.

A folder named by the time is shared by jobs that start in the same second, as those of an array do; and a job that
Slurm requeues, or that torchrun restarts, would begin another. So the folder is claimed by making it, and each attempt
leaves a note in it, by which the next one finds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.slurm_environment import find_slurm_step

__all__ = ["RESOLVERS", "forget_run_folders", "new_version", "run_attempt", "run_folder", "without_claiming"]

_NOTE = ".attempt"
_MOST = 10_000  # folders of one name

_claimed: dict[str, str] = {}
_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)


def run_attempt(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return what all attempts of this run have in common, and how many came before; ``None`` without a scheduler.

    Args:
        environ: Environment variables; by default those of this process.
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" in environ:
        # Without --rdzv-id all jobs have the same one; their agents differ.
        run = f"{environ['TORCHELASTIC_RUN_ID']}-{environ.get('MASTER_ADDR')}-{os.getppid()}"
        return f"torchrun-{_plain(run)}", _number(environ.get("TORCHELASTIC_RESTART_COUNT"))
    if "SLURM_JOB_ID" not in environ:
        return None
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID')}"
    step = find_slurm_step(environ)
    part = f"-{step.step}" if step is not None else ""
    return f"slurm-{_plain(job)}{part}", _number(environ.get("SLURM_RESTART_COUNT"))


def run_folder(wanted: str) -> str:
    """Return the folder of this run: the one of its former attempt, or a new one called ``wanted``.

    Where that is taken, ``wanted-1``, ``wanted-2`` and so on are tried. The folder is made, so no other run gets it.

    Args:
        wanted: Path of the folder.

    Raises:
        ConfigurationError: No folder can be made there.

    Ranks: rank 0, for all.
    """
    if _only_looking.get():
        return _claimed.get(wanted, wanted)
    if wanted not in _claimed:
        _claimed[wanted] = _former(Path(wanted)) or _claim(wanted)
        _leave_note(Path(_claimed[wanted]))
    return _claimed[wanted]


def new_version(folder: str) -> str:
    """Return a name for what this attempt of a run logs below ``folder``: empty if nothing is there yet.

    Lightning's CSV logger deletes the rows that an earlier attempt has written to the same file.

    Args:
        folder: Folder of the logger.
    """
    if not Path(folder, "metrics.csv").exists():
        return ""
    return next(name for n in range(1, _MOST) if not Path(folder, name := f"attempt-{n}").exists())


#: What OmegaConf resolves, by name.
RESOLVERS = {"lockstep.run_folder": run_folder, "lockstep.new_version": new_version}


@contextmanager
def without_claiming() -> Iterator[None]:
    """In this context :func:`run_folder` returns what is wanted, and makes nothing."""
    token = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(token)


def forget_run_folders() -> None:
    """Let the next run of this process have folders of its own."""
    _claimed.clear()


def _claim(wanted: str) -> str:
    try:
        Path(wanted).parent.mkdir(parents=True, exist_ok=True)
        for number in range(_MOST):
            path = f"{wanted}-{number}" if number else wanted
            with suppress(FileExistsError):
                Path(path).mkdir()
                return path
    except OSError as error:
        raise ConfigurationError(
            f"hydra.run.dir={wanted}: no folder can be made there ({error.strerror}). Expected a place where you may"
            " write, such as hydra.run.dir='${lockstep.run_folder:/scratch/me/run}'."
        ) from error
    raise ConfigurationError(f"hydra.run.dir={wanted}: there are {_MOST} folders of that name already.")


def _former(wanted: Path) -> str | None:
    """Return the folder of the attempt before this one."""
    attempt = run_attempt()
    if attempt is None or attempt[1] == 0:
        return None
    found = [note for note in wanted.parent.glob(f"*/{_NOTE}") if _is_of(note, attempt[0])]
    newest = max(found, key=lambda note: note.stat().st_mtime, default=None)
    return None if newest is None else str(newest.parent)


def _is_of(note: Path, run: str) -> bool:
    # Checkpoints of that folder may be loaded: others may be able to make one beside it.
    with suppress(OSError, ValueError):
        own = note.stat().st_uid == note.parent.stat().st_uid == os.geteuid()
        return own and note.read_text().strip() == run
    return False


def _leave_note(folder: Path) -> None:
    attempt = run_attempt()
    if attempt is not None:
        with suppress(OSError):  # then a later attempt has a folder of its own
            (folder / _NOTE).write_text(f"{attempt[0]}\n")


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
