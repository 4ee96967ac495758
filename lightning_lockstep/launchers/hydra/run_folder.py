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

from lightning_lockstep._files import write_whole
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.environments.slurm_environment import find_slurm_step

__all__ = ["RESOLVERS", "forget_run_folders", "new_version", "run_folder", "run_names", "without_claiming"]

_NOTE = ".attempt"
_MOST = 10_000  # folders of one name
_NO_RUN_ID = "none"  # torchrun's own where it is given none

_claimed: dict[str, str] = {}
_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)


def run_names(environ: Mapping[str, str] | None = None) -> list[tuple[str, int]]:
    """Return the names by which the attempts of this run find each other, and how many came before.

    There are none without a scheduler. The most specific name comes first. torchrun may run in a job of
    Slurm: after a requeue it starts to count again, and with ``--standalone`` it has another run id.
    """
    environ = os.environ if environ is None else environ
    names, restarts = [], _number(environ.get("TORCHELASTIC_RESTART_COUNT"))
    if "TORCHELASTIC_RUN_ID" in environ:
        run = environ["TORCHELASTIC_RUN_ID"]
        # Jobs may have one run id: without --rdzv-id all have. Their agents differ, but another one may have rank 0
        # after a restart.
        particular = [run, environ.get("MASTER_ADDR", ""), str(os.getppid())]
        names.append((f"torchrun-{_plain('-'.join(particular))}", restarts))
        if run != _NO_RUN_ID:
            names.append((f"torchrun-{_plain(run)}", restarts))
    if "SLURM_JOB_ID" in environ:
        requeues = _number(environ.get("SLURM_RESTART_COUNT"))
        names.append((f"slurm-{_slurm_job(environ)}", requeues + restarts))
    return names


def _slurm_job(environ: Mapping[str, str]) -> str:
    job = environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in environ:
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID')}"
    step = find_slurm_step(environ)
    return _plain(job if step is None else f"{job}-{step.step}")


def run_folder(wanted: str) -> str:
    """Return the folder of this run: the one of its former attempt, or a new one called ``wanted``.

    Where that is taken, ``wanted-1``, ``wanted-2`` and so on are tried. The folder is made, so no other run gets it.
    Rank 0 calls this, for all.
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
    for name, earlier in run_names():
        notes = wanted.parent.glob(f"*/{_NOTE}") if earlier else ()
        if found := [note for note in notes if _is_of(note, name)]:
            return str(max(found, key=lambda note: note.stat().st_mtime).parent)
    return None


def _is_of(note: Path, run: str) -> bool:
    # Checkpoints of that folder may be loaded: others may be able to make one beside it.
    with suppress(OSError, ValueError):
        own = note.stat().st_uid == note.parent.stat().st_uid == os.geteuid()
        return own and run in note.read_text(encoding="utf-8").splitlines()
    return False


def _leave_note(folder: Path) -> None:
    if names := run_names():
        # Where it cannot be written, a later attempt has a folder of its own.
        write_whole(folder / _NOTE, "".join(f"{name}\n" for name, _ in names))


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
