"""A Hydra program started again as further ranks: its frozen configuration, and the one run folder of all."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_lockstep._settings import RANK_CONFIG
from lightning_lockstep._system import write_whole
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.rank_variables import find_slurm_step, slurm_job

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig


# -- A frozen configuration as text, for ranks that do not read the command line --


def config_to_text(config: DictConfig | None) -> str:
    """Return a configuration, or none, as text."""
    from omegaconf import OmegaConf

    return "" if config is None else json.dumps([OmegaConf.to_yaml(config), OmegaConf.is_struct(config)])


def config_from_text(text: str) -> DictConfig | None:
    """Return what :func:`config_to_text` was given, its dataclasses but for Hydra's own as plain dictionaries."""
    from hydra.conf import HydraConf
    from omegaconf import OmegaConf

    if not text:
        return None
    values, is_struct = json.loads(text)
    config: DictConfig = OmegaConf.create(values)
    if "hydra" in config:  # Hydra accepts only its own dataclass
        own = OmegaConf.structured(HydraConf)
        OmegaConf.set_struct(own, False)
        config.hydra = OmegaConf.merge(own, config.hydra)
        OmegaConf.set_struct(config.hydra, None)
    OmegaConf.set_struct(config, is_struct or None)
    return config


# -- What runs this program again --

# The command of the program that has sent this process a job, if a launcher of sweeps has.
_sent_by: tuple[list[str], str | None] | None = None


def sent_by(program: tuple[list[str], str | None] | None) -> None:
    """Start further ranks of this process with the command of the program that has sent it its job."""
    global _sent_by
    _sent_by = program


def program_arguments(started_in: str) -> tuple[list[str], str | None]:
    """Return the arguments with which the interpreter runs this program again, and in which folder."""
    if _sent_by is not None:
        return _sent_by
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is not None and spec.name.partition(".")[0] in ("joblib", "submitit"):
        raise LaunchError(
            "A job of hydra/launcher=joblib or submitit cannot start further ranks, because it runs in the launcher's"
            " program and not in yours: expected a program with `lightning_lockstep.hydra_main`, or"
            " start_method='fork', or submitit's tasks_per_node as the number of ranks."
        )
    if spec is not None:
        return ["-m", spec.name], started_in
    # With hydra.job.chdir rank 0 works in its run folder; so do the others.
    return [str(program_file(started_in))], str(Path.cwd())


def program_file(started_in: str) -> Path:
    """Return the script of this program, which other ranks run again."""
    script = Path(started_in, sys.argv[0])
    if not script.is_file():
        given = {"-c": "python -c", "-": "standard input", "": "standard input"}
        raise LaunchError(
            f"The program is {given.get(sys.argv[0], repr(sys.argv[0]))}, which is not a file in {started_in}, but"
            " ranks are started by running it again. Put it into a file, or fork the ranks from this process:"
            " strategy='lockstep_ddp_fork', or start_method='fork'."
        )
    return script


# -- The command that starts one more rank of a Hydra program, with the configuration that rank 0 has --
# Running the same command line again on every rank composes the configuration once per rank: `${now:...}`
# gives each rank its own folder, quotes are lost on the way, and in a sweep a rank does not know which
# of the jobs it belongs to. So the configuration is resolved once, on rank 0, and handed on in an environment
# variable, which mpirun carries to other hosts too: a file would have to lie in a folder that all hosts share, where
# others may replace it, and a forced end would leave it behind. Every `@hydra.main` program accepts
# `--experimental-rerun FILE`, which runs the program on a finished configuration and creates no folder.

# Hydra warns at each use that the option is experimental; Python compares the start of the message.
_QUIET = ("-W", "ignore:Experimental rerun CLI option:UserWarning")
_LONGEST = 120_000  # Linux takes variables of up to 128 KiB

# Hydra's option wants a path: that of a file without a name, in the process that runs the program.
_RECEIVE = f"""
import base64, os, sys, tempfile, zlib
file = tempfile.TemporaryFile(buffering=0)
file.write(zlib.decompress(base64.b64decode(os.environ.pop({RANK_CONFIG!r}))))
file.seek(0)
os.set_inheritable(file.fileno(), True)
os.execv(sys.argv[1], [*sys.argv[1:], "--experimental-rerun", "/dev/fd/%d" % file.fileno()])
"""


def current_hydra_config() -> DictConfig | None:
    """Return the whole configuration of the Hydra job that is running, the program's and Hydra's own, if any."""
    module = sys.modules.get("hydra.core.hydra_config")  # Hydra is never imported here
    if module is None or not module.HydraConfig.initialized():
        return None
    # Hydra keeps the program's part as the hidden parent of its own part, for interpolations between the two.
    whole: DictConfig = module.HydraConfig.instance().cfg.hydra._get_parent()
    return whole


def freeze(config: Any) -> Any:
    """Replace every interpolation by its present value, in the configuration itself; return it."""
    # Types of structured configs are kept. A value that must still be given (`???`) stays so, and an interpolation
    # that cannot be resolved stays as it is: only a program that reads it has a problem. OmegaConf.resolve would raise.
    # A copy takes the resolver cache along, so `${now:...}` keeps in it a value that it has already had.
    from omegaconf import OmegaConf, flag_override
    from omegaconf.errors import OmegaConfBaseException

    keys = list(config.keys()) if OmegaConf.is_dict(config) else range(len(config))
    for key in keys:
        # Hydra makes its own part read-only; an interpolation may name a value that nobody gave.
        with (
            flag_override(config, ["readonly", "struct"], [False, False]),
            suppress(OmegaConfBaseException),
        ):
            if OmegaConf.is_interpolation(config, key):
                config[key] = config[key]
        inner = inner_container(config, key)
        if inner is not None:
            freeze(inner)
    return config


def inner_container(container: Any, key: Any) -> DictConfig | ListConfig | None:
    """Return the dictionary or list under a key, not one that is null, `???` or an interpolation."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if OmegaConf.is_missing(container, key) or OmegaConf.is_interpolation(container, key):
        return None
    inner = container[key]
    return inner if isinstance(inner, (DictConfig, ListConfig)) else None


def for_other_ranks(config: DictConfig) -> DictConfig:
    """Return a frozen copy for the ranks other than rank 0: the same values, but nothing in it writes a file."""
    from omegaconf import flag_override

    config = freeze(copy.deepcopy(config))
    with flag_override(config.hydra, ["readonly", "struct"], [False, False]):
        config.hydra.output_subdir = None
        handlers = config.hydra.job_logging.get("handlers") or {}
        for name, handler in list(handlers.items()):
            if "filename" in handler:
                handlers[name] = {"class": "logging.NullHandler"}
    return config


def without_hydra(config: DictConfig) -> DictConfig:
    """Return a copy without the `hydra` node: what the program's own function is called with."""
    from omegaconf import flag_override

    task: DictConfig = copy.deepcopy(config)
    with flag_override(task, ["readonly", "struct"], [False, False]):
        del task["hydra"]
    return task


def hydra_child_command() -> tuple[list[str], str | None, dict[str, str]] | None:
    """Return (command, folder, variables) that starts another rank of the Hydra job that is running, on any host."""
    config = current_hydra_config()
    if config is None:
        return None
    program, folder = program_arguments(str(config.hydra.runtime.cwd))
    packed = base64.b64encode(zlib.compress(pickle.dumps(for_other_ranks(config)))).decode()
    if len(packed) > _LONGEST:
        raise LaunchError(
            f"The configuration of this job takes {len(packed):,} bytes when packed: expected at most {_LONGEST:,}, the"
            " most that other ranks can be given. Keep long lists in a file that the configuration names, or start the"
            " ranks with torchrun or mpirun."
        )
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags(), *_QUIET]  # type: ignore[attr-defined]
    command = [sys.executable, "-I", "-c", _RECEIVE, *interpreter, *program]
    return command, folder, {RANK_CONFIG: packed}


# -- The folder of a run: made for this run alone, and found again by a later attempt of the same run --
# Jobs that start in the same second would share a folder that is named by the time, and a job that Slurm requeues or
# torchrun restarts would begin another one. So a run claims its folder by making it, and leaves a note in it, by which
# its next attempt finds it.

_NOTE = ".attempt"

_claimed: dict[str, str] = {}
_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)


def run_names(environ: Mapping[str, str] | None = None) -> list[tuple[str, int]]:
    """Return the names by which the attempts of this run find each other, and how many came before."""
    # torchrun may run in a job of Slurm: after a requeue it counts its restarts anew, and with ``--standalone`` it has
    # another run id.
    environ = os.environ if environ is None else environ
    names, restarts = [], int(environ.get("TORCHELASTIC_RESTART_COUNT", 0))
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


def run_folder(wanted: str) -> str:
    """Return the folder of this run: the one of its former attempt, or a new one called ``wanted``."""
    # If that is taken, ``wanted-1``, ``wanted-2`` and so on are tried. Rank 0 calls this, for all ranks.
    if _only_looking.get():
        return _claimed.get(wanted, wanted)
    if wanted not in _claimed:
        _claimed[wanted] = _former(Path(wanted)) or _claim(wanted)
        _leave_note(Path(_claimed[wanted]))
    return _claimed[wanted]


def new_version(folder: str) -> str:
    """Return a name for what this attempt of a run logs below ``folder``: empty if nothing is there yet."""
    # Lightning's CSV logger deletes the rows that an earlier attempt has written to the same file.
    if not Path(folder, "metrics.csv").exists():
        return ""
    return next(name for n in itertools.count(1) if not Path(folder, name := f"attempt-{n}").exists())


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
    """Let the next run of this process have its own folders."""
    _claimed.clear()


def _claim(wanted: str) -> str:
    numbers = itertools.count(1)
    path = wanted
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        while True:
            with suppress(FileExistsError):
                Path(path).mkdir()
                return path
            path = f"{wanted}-{next(numbers)}"
    except OSError as error:
        raise ConfigurationError(
            f"hydra.run.dir={wanted}: no folder can be made there ({error.strerror}). Expected a place where you may"
            " write, such as hydra.run.dir='${lockstep.run_folder:/scratch/me/run}'."
        ) from error


def _former(wanted: Path) -> str | None:
    """Return the folder of the attempt before this one."""
    for name, earlier in run_names():
        notes = wanted.parent.glob(f"*/{_NOTE}") if earlier else ()
        if found := [note for note in notes if _is_of(note, name)]:
            return str(max(found, key=lambda note: note.stat().st_mtime).parent)
    return None


def _is_of(note: Path, run: str) -> bool:
    # Checkpoints of that folder may be loaded, and other users may be able to make a folder next to it.
    with suppress(OSError, ValueError):
        own = note.stat().st_uid == note.parent.stat().st_uid == os.geteuid()
        return own and run in note.read_text(encoding="utf-8").splitlines()
    return False


def _leave_note(folder: Path) -> None:
    if names := run_names():
        # If it cannot be written, a later attempt has its own folder.
        write_whole(folder / _NOTE, "".join(f"{name}\n" for name, _ in names))
