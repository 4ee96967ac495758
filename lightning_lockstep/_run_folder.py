"""The folder of a run: made for it alone, its records, its checkpoints, and the one to go on from."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shlex
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePath
from typing import Any

import yaml

from lightning_lockstep._system import write_whole
from lightning_lockstep.deepspeed.checkpoints.file_names import CONSOLIDATED, is_state_file
from lightning_lockstep.distributed.checkpoint_folder import BEFORE, saved_at
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.rank_variables import find_slurm_step, slurm_job

# No torch here: the doctor reads run folders even if torch cannot be imported.

# What a run leaves in its folder, Hydra's own first; the last ones are those of a logger of Lightning.
_MARKS = (
    ".hydra",
    "summary.json",
    "failure.json",
    "lost.json",
    "batch_size.json",
    "overflow",
    "checkpoints",
    "csv/metrics.csv",
    "metrics.csv",
    "hparams.yaml",
)
_STARTED = ".hydra/overrides.yaml"  # rewritten at the start of each attempt
_BEGIN_MARK = ".begun"
_LAST = Path("checkpoints", "last.ckpt")
_UNQUOTED = re.compile(r"[\w./:@%+-]+")


class RunFolder:
    """A folder that a user has named."""

    def __init__(self, given: str) -> None:
        self.given = given  # as the user wrote it
        self.path = Path(given).absolute()
        self.unreadable: list[str] = []  # records that were asked for and could not be read

    @property
    def is_of_a_run(self) -> bool:
        return any(self.has(mark) for mark in _MARKS)

    @property
    def is_of_lockstep_train(self) -> bool:
        """Whether Hydra has made it: such a run leaves a summary, and goes on by a command."""
        return self.has(".hydra")

    def runs_below(self) -> list[RunFolder]:
        """Return the run folders in it, such as those of the jobs of a sweep, in the order of their numbers."""
        for names in ("*", "*/*"):  # a script's runs are in lightning_logs/version_0 and so on
            below = [RunFolder(str(PurePath(self.given, name))) for name in self.glob(names)]
            if found := [folder for folder in below if folder.is_of_a_run]:
                return sorted(found, key=lambda folder: (len(folder.given), folder.given))
        return []

    def has(self, name: str = "") -> bool:
        return (self.path / name).exists()

    def glob(self, *patterns: str) -> list[str]:
        """Return the names that match, relative to the folder, whatever characters its own name has."""
        return [str(path.relative_to(self.path)) for pattern in patterns for path in self.path.glob(pattern)]

    def text(self, name: str) -> str:
        """Return what a file holds, the empty string if there is none."""
        with suppress(OSError):
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        return ""

    def record(self, name: str) -> dict[str, Any] | None:
        """Return a record of the run; ``None`` if there is none, or if it cannot be read (see ``unreadable``)."""
        if not self.has(name):
            return None
        with suppress(ValueError, RecursionError):
            found = json.loads(self.text(name))
            if isinstance(found, dict):
                return found
        self.unreadable.append(name)
        return None

    def age(self, name: str) -> float:
        """Return how long ago a file was written to [s]; infinite if there is none."""
        with suppress(OSError):
            return time.time() - (self.path / name).stat().st_mtime
        return math.inf

    def is_of_earlier_attempt(self, name: str) -> bool:
        """Return whether a file was written before the last attempt began."""
        return self.has(_STARTED) and self.age(name) > self.age(_STARTED)

    def checkpoints(self) -> list[str]:
        """Return the checkpoints from which a run can go on, the newest first."""
        names = self.glob("checkpoints/*.ckpt", "*.ckpt")
        return sorted((name for name in names if can_be_resumed(self.path / name)), key=self.age)

    def shown(self, name: str = "") -> str:
        return shlex.quote(str(PurePath(self.given, name)))

    def resume_command(self, checkpoint: str) -> str | None:
        """Return the command of lockstep-train that goes on from a checkpoint in it; `None` for another program."""
        try:
            hydra = yaml.safe_load(self.text(".hydra/hydra.yaml"))["hydra"]
            job, typed = hydra["job"], hydra["overrides"]
            sources = {each["provider"]: each["path"] for each in hydra["runtime"]["config_sources"]}
            if (job["name"], sources["main"]) != ("train", "lightning_lockstep.conf"):
                return None
            given = ["--config-dir", sources["command-line"]] if "command-line" in sources else []
            given += ["--config-name", job["config_name"]] if job["config_name"] != "lockstep_train" else []
            given += [line for line in typed["hydra"] if "hydra.searchpath=" in line]
            given += [line for line in typed["task"] if not line.startswith("ckpt_path=")]
        except (yaml.YAMLError, LookupError, TypeError):
            return None
        path = str(PurePath(self.given, checkpoint))
        if not _UNQUOTED.fullmatch(path):  # such a path also has quotes for Hydra
            path = '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return " ".join(["lockstep-train", *map(shlex.quote, [*given, f"ckpt_path={path}"])])


# -- Which checkpoint `ckpt_path` means --


def mark_begin(run_folder: Path) -> None:
    """Leave a file in a run folder whose time is that at which the first attempt of the run began; on rank 0."""
    # It exists already; or nothing can be written: then only files in the folder are the run's.
    with suppress(OSError):
        (run_folder / _BEGIN_MARK).touch(exist_ok=False)


def find_checkpoint(
    given: str | None, *, run_folder: Path, started_in: Path, folders: Sequence[Path] = ()
) -> str | None:
    """Return the file or folder that `ckpt_path` means; ``folders``: where the run saves besides its own."""
    if given is None or "://" in given:
        return given
    run_folder = run_folder.absolute()
    if given == "auto":  # this run's newest from which a fit can go on, if there is one
        found = _newest_of_this_run(run_folder, folders)
        return None if found is None else str(found)
    if given == "last":  # the newest last.ckpt of this run folder or of those next to it
        return str(_newest_beside(run_folder))
    path = Path(started_in, given).absolute()
    if path.is_dir() and not _is_checkpoint_folder(path):
        path = path / _LAST
    path = saved_at(path)
    if not (path.is_file() or _is_checkpoint_folder(path)):
        raise ConfigurationError(f"ckpt_path={given}: there is no checkpoint {path}")
    return str(path)


def can_be_resumed(path: Path) -> bool:
    """Return whether a checkpoint was written to its end, and has more than the weights."""
    if path.name.endswith(CONSOLIDATED):
        return False
    if path.is_dir():
        return _is_checkpoint_folder(path)
    try:  # torch's files are archives, with their index at the end
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            return b"optimizer_states" in archive.read(pickled)
    except (OSError, zipfile.BadZipFile, StopIteration):
        return False


def _is_checkpoint_folder(path: Path) -> bool:
    """Whether ranks have written this folder together: with torch's ``.metadata``, or DeepSpeed's files."""
    files = [*path.glob("*.pt"), *path.glob("*/*.pt")]  # DeepSpeed's are below its tag
    return (path / ".metadata").is_file() or any(is_state_file(file.name) for file in files)


def _newest_of_this_run(run_folder: Path, folders: Iterable[Path]) -> Path | None:
    """The newest checkpoint of a run from which a fit can go on, of whatever callback, or of a requeue."""
    found = {
        saved_at(Path(str(path).removesuffix(BEFORE)), says=False)
        for folder in (run_folder / "checkpoints", *folders)
        for pattern in ("*.ckpt", f"*.ckpt{BEFORE}")
        for path in folder.glob(pattern)
    }
    found |= set(run_folder.glob("hpc_ckpt_*.ckpt"))
    ages = {path: path.stat().st_mtime for path in found if _belongs(path, run_folder)}
    return next(filter(can_be_resumed, sorted(ages, key=ages.__getitem__, reverse=True)), None)


def _belongs(path: Path, run_folder: Path) -> bool:
    """Whether a checkpoint is this run's: others may save in a folder that is not the run's own."""
    if path.is_relative_to(run_folder):
        return True
    mark = run_folder / _BEGIN_MARK
    return mark.exists() and path.stat().st_mtime >= mark.stat().st_mtime


def _newest_beside(run_folder: Path) -> Path:
    # Next to a run lie other runs; next to a job of a sweep its other jobs, next to the sweep other sweeps.
    own = saved_at(run_folder / _LAST)
    others = (saved_at(folder / _LAST, says=False) for folder in run_folder.parent.glob("*"))
    found = [own] if own.exists() else [path for path in others if path.exists()]
    if not found:
        raise ConfigurationError(
            f"ckpt_path=last: no run under {run_folder.parent} has a {_LAST} yet; name a file or a run folder"
        )
    return max(found, key=lambda path: path.stat().st_mtime)


# -- The folder of a run: made for this run alone, and found again by a later attempt of the same run --
# Jobs that start in the same second would share a folder that is named by the time, and a job that Slurm requeues or
# torchrun restarts would begin another one. So a run claims its folder by making it, and leaves its names in it, by
# which its next attempt finds it.

_RUN_NAMES = ".attempt"

_claimed: dict[str, str] = {}
_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)


def run_names() -> list[tuple[str, int]]:
    """Return the names by which the attempts of this run find each other, and how many came before."""
    # In a job of Slurm that is requeued, torchrun counts its restarts anew; ``--standalone`` makes another run id.
    environ, names = os.environ, list[tuple[str, int]]()
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        if run == "none":  # without --rdzv-id all jobs have this one, but each has its own agents
            run = f"{run}-{environ.get('MASTER_ADDR', '')}-{os.getppid()}"
        names.append((f"torchrun-{run}", restarts))
    if "SLURM_JOB_ID" in environ:
        requeues = int(environ.get("SLURM_RESTART_COUNT", 0))
        step = find_slurm_step(environ)
        name = slurm_job(environ) + (f"-{environ.get('SLURM_STEP_ID')}" if step is not None else "")
        names.append((f"slurm-{name}", requeues + restarts))
    return names


def claimed_folder(wanted: str) -> str:
    """Return the folder of this run: the one of its former attempt, or a new one called ``wanted``."""
    # If that is taken, ``wanted-1``, ``wanted-2`` and so on are tried. Rank 0 calls this, for all ranks.
    if _only_looking.get():
        return _claimed.get(wanted, wanted)
    if wanted not in _claimed:
        _claimed[wanted] = _former(Path(wanted)) or _claim(wanted)
        if names := run_names():
            # If it cannot be written, a later attempt has its own folder.
            write_whole(Path(_claimed[wanted], _RUN_NAMES), "".join(f"{name}\n" for name, _ in names))
    return _claimed[wanted]


def new_version(folder: str) -> str:
    """Return a name for what this attempt of a run logs below ``folder``: empty if nothing is there yet."""
    # Lightning's CSV logger deletes the rows that an earlier attempt has written to the same file.
    if not Path(folder, "metrics.csv").exists():
        return ""
    return next(name for n in itertools.count(1) if not Path(folder, name := f"attempt-{n}").exists())


#: What OmegaConf resolves, by name.
RESOLVERS = {"lockstep.run_folder": claimed_folder, "lockstep.new_version": new_version}


@contextmanager
def without_claiming() -> Iterator[None]:
    """In this context :func:`claimed_folder` returns what is wanted, and makes nothing."""
    token = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(token)


def forget_run_folders() -> None:
    """Let the next run of this process have its own folders."""
    _claimed.clear()


def _claim(wanted: str) -> str:
    Path(wanted).parent.mkdir(parents=True, exist_ok=True)
    for path in itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(1))):
        with suppress(FileExistsError):
            Path(path).mkdir()
            break
    return path


def _former(wanted: Path) -> str | None:
    """Return the folder of the attempt before this one."""
    for name, earlier in run_names():
        files = wanted.parent.glob(f"*/{_RUN_NAMES}") if earlier else ()
        if found := [file for file in files if _names_run(file, name)]:
            return str(max(found, key=lambda file: file.stat().st_mtime).parent)
    return None


def _names_run(file: Path, run: str) -> bool:
    # Checkpoints of that folder may be loaded, and other users may be able to make a folder next to it.
    with suppress(OSError, ValueError):
        own = file.stat().st_uid == file.parent.stat().st_uid == os.geteuid()
        return own and run in file.read_text(encoding="utf-8").splitlines()
    return False
