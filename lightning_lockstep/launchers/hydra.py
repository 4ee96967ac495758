"""A Hydra program started again as further ranks: its frozen configuration, and the one run folder of all."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from lightning_lockstep._system import write_whole
from lightning_lockstep.distributed.failure.process_exit import at_exit
from lightning_lockstep.distributed.rendezvous import signed, verified
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.rank_variables import find_slurm_step

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig


# -- A frozen configuration as bytes, for ranks that do not read the command line --
# OmegaConf keeps the types of a structured config, so this is a pickle; but one that can hold nodes of
# OmegaConf, dataclasses, enumerations and plain values only, and that is read only if it carries the
# signature of this job.
#
# Types go by their names, even those that cannot be found under them here. In a process to which a launcher
# of sweeps has sent the job, the classes of the program's own script are copies, and Hydra has loaded its
# plugins a second time.

_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_PLAIN = {
    "_operator": {"getitem"},  # annotations such as ``list[int]``
    "builtins": {
        *("Ellipsis", "NoneType", "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list"),
        *("object", "set", "str", "tuple"),
    },
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "types": {"NoneType", "UnionType", "GenericAlias"},
    "typing": {"Any", "Dict", "List", "Literal", "Optional", "Sequence", "Tuple", "Union"},
}


def pickled(config: DictConfig | None) -> bytes:
    """Return a configuration as a pickle that the program itself can read, wherever this is called."""
    buffer = io.BytesIO()
    _ConfigPickler(buffer).dump(config)
    return buffer.getvalue()


def class_named(module: str, name: str) -> Any:
    """Return the class of this name; pickles refer to it."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _ConfigPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Let a class that is not the one under its name be that one for the reader."""
        if not isinstance(value, type) or _found_under_its_name(value):
            return NotImplemented
        return class_named, (value.__module__, value.__qualname__)


def _found_under_its_name(kind: type) -> bool:
    try:
        return class_named(kind.__module__, kind.__qualname__) is kind
    except (ImportError, AttributeError):
        return False


def config_to_bytes(config: DictConfig | None) -> bytes:
    """Return a configuration, or none, as bytes with the signature of this job."""
    return signed(pickled(config))


def config_from_bytes(data: bytes) -> DictConfig | None:
    """Return what :func:`config_to_bytes` was given."""
    # LaunchError: it does not come from a rank of this job; UnpicklingError: it is no configuration.
    config: DictConfig | None = _ConfigUnpickler(io.BytesIO(verified(data))).load()
    return config


class _ConfigUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, class_named.__name__):
            return self.find_class
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        found = super().find_class(module, name)
        nodes = module.startswith("omegaconf.") and isinstance(found, type)
        if nodes or (isinstance(found, type) and (issubclass(found, Enum) or is_dataclass(found))):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a configuration")


# -- Which program a Hydra job belongs to, also where a launcher of sweeps runs the job in a process of its
# own
#
# Such a process (a worker of joblib, a task of submitit) is another program than the user's: it was sent
# the user's function and calls it. A further rank has to be the user's program, so it is found from that
# function.


def program_arguments(started_in: str) -> tuple[list[str], str | None]:
    """Return what follows the interpreter on the command line, and the folder in which it means this program."""
    function = _function_sent_here()
    if function is not None:
        return _program_of(function, started_in)
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name], started_in
    script = Path(started_in, sys.argv[0])
    if not script.is_file():
        raise LaunchError(
            f"This Hydra program cannot start further ranks: it was started as {sys.argv[0]!r}, which is"
            f" not a file in {started_in}. Start it from a script or with `python -m`, or let torchrun start"
            " all ranks."
        )
    # With hydra.job.chdir rank 0 works in its run folder; so do the others.
    return [str(script)], str(Path.cwd())


def _function_sent_here() -> FunctionType | None:
    """The function of the job that runs, if it was sent to this process; ``None`` in the program itself."""
    function = None
    frame = inspect.currentframe()
    while frame is not None:
        # These two functions of Hydra run a command line and a job. A job that was sent to another process is known by
        # the function that runs it there, and nowhere else.
        if _is_in(frame, "hydra._internal.utils", "_run_hydra"):
            return None
        if _is_in(frame, "hydra.core.utils", "run_job"):
            function = inspect.unwrap(frame.f_locals["task_function"])
        frame = frame.f_back
    return function


def _is_in(frame: FrameType, module: str, function: str) -> bool:
    return (frame.f_globals.get("__name__"), frame.f_code.co_name) == (module, function)


def _program_of(function: FunctionType, started_in: str) -> tuple[list[str], str | None]:
    # A function that was sent by its code has no file, from cloudpickle 3.1.3 on; its module has.
    module, names = function.__module__, function.__globals__
    file, package = names.get("__file__"), names.get("__package__")
    if module != "__main__":
        # A console command imports the function and calls it. The file stands for the command in messages.
        code = f"import sys; from {module} import {function.__name__} as main; sys.argv[0] = {file or module!r}; main()"
        return ["-c", code], started_in
    if file is None or not Path(file).is_file():
        raise LaunchError(
            f"This Hydra program cannot start further ranks: {function.__name__}() was sent here from {file}, which"
            " is not a file on this host. Start the program from a script that every host can read."
        )
    if package is not None:  # python -m
        return ["-m", ".".join([*filter(None, [package]), Path(file).stem])], started_in
    return [file], str(Path.cwd())


# -- The command that starts one more rank of a Hydra program, with the configuration that rank 0 has --
# Running the same command line again on every rank composes the configuration once per rank: `${now:...}`
# gives each rank its own folder, quotes are lost on the way, and in a sweep a rank does not know which
# of the jobs it belongs to. So the configuration is resolved once, on rank 0, and passed on as a file:
# every `@hydra.main` program accepts `--experimental-rerun FILE`, which runs the program on a finished
# configuration and creates no folder.

# Hydra announces the option as experimental on every use; matched from the start of its message.
_QUIET = ("-W", "ignore:Experimental rerun CLI option:UserWarning")

# The last configuration written, its path and its descriptor: all children of one job share it.
_written: tuple[DictConfig, str, int] | None = None


def current_hydra_config() -> DictConfig | None:
    """Return the whole configuration of the Hydra job that is running, the program's and Hydra's own, if any."""
    module = sys.modules.get("hydra.core.hydra_config")  # Hydra is never imported here
    if module is None or not module.HydraConfig.initialized():
        return None
    # Hydra keeps the program's part as the hidden parent of its own part, for interpolations between the two.
    whole: DictConfig = module.HydraConfig.instance().cfg.hydra._get_parent()
    return whole


def freeze(config: DictConfig) -> DictConfig:
    """Replace every interpolation by its present value, in the configuration itself; return it."""
    # Types of structured configs are kept. A value that must still be given (`???`) stays so, and an interpolation
    # that cannot be resolved stays as it is: only a program that reads it has a problem. A copy takes the resolver
    # cache along, so `${now:...}` keeps in it a value that it has already had.
    _resolve_in_place(config)
    return config


def _resolve_in_place(container: Any) -> None:
    from omegaconf import OmegaConf, flag_override

    keys = list(container.keys()) if OmegaConf.is_dict(container) else range(len(container))
    for key in keys:
        # Hydra makes its own part read-only.
        with flag_override(container, ["readonly", "struct"], [False, False]):
            if OmegaConf.is_interpolation(container, key):
                _put_value(container, key)
        inner = inner_container(container, key)
        if inner is not None:
            _resolve_in_place(inner)


def _put_value(container: Any, key: Any) -> None:
    """Put the value of the interpolation under a key in its place; one without a value stays as it is."""
    from omegaconf import Container
    from omegaconf.errors import OmegaConfBaseException

    # By private names, since OmegaConf.resolve takes all interpolations or raises, and setting a key loses types.
    node = container._get_node(key)
    try:
        value = node._dereference_node()
    except OmegaConfBaseException:
        return  # names a value that nobody gave; an error only where it is read
    if isinstance(value, Container):
        value = copy.deepcopy(value)
        value._set_parent(container)
        container._content[key] = value
    else:
        node._set_value(value._value())


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
        config.hydra.job_logging = _without_files(config.hydra.job_logging)
    return config


def _without_files(logging_config: Any) -> Any:
    """Drop the handlers that write files from a `logging.config` dictionary."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(logging_config, resolve=False)
    if not isinstance(plain, dict) or not isinstance(plain.get("handlers"), dict):
        return plain
    files = {
        name
        for name, handler in plain["handlers"].items()
        if isinstance(handler, dict)
        and ("filename" in handler or "FileHandler" in str(handler.get("class", "")))
    }
    plain["handlers"] = {name: handler for name, handler in plain["handlers"].items() if name not in files}
    loggers = plain.get("loggers")
    for logger in [plain.get("root"), *(loggers.values() if isinstance(loggers, dict) else [])]:
        if isinstance(logger, dict) and isinstance(logger.get("handlers"), list):
            logger["handlers"] = [name for name in logger["handlers"] if name not in files]
    return plain


def without_hydra(config: DictConfig) -> DictConfig:
    """Return a copy without the `hydra` node: what the program's own function is called with."""
    from omegaconf import flag_override

    task: DictConfig = copy.deepcopy(config)
    with flag_override(task, ["readonly", "struct"], [False, False]):
        del task["hydra"]
    return task


def hydra_child_command() -> tuple[list[str], str | None] | None:
    """Return the command that starts another rank of the Hydra job that is running."""
    config = current_hydra_config()
    if config is None:
        return None
    program, folder = program_arguments(str(config.hydra.runtime.cwd))
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags(), *_QUIET]  # type: ignore[attr-defined]
    return [*interpreter, *program, "--experimental-rerun", _config_file(config)], folder


def _config_file(config: DictConfig) -> str:
    global _written
    if _written is not None and _written[0] is config:
        return _written[1]
    if _written is not None:
        os.close(_written[2])
    content = pickled(for_other_ranks(config))
    # Only processes of this user can read it, and it is gone when this process is.
    handle, path = tempfile.mkstemp(prefix="lockstep-config-", suffix=".pickle")
    nameless = Path(f"/proc/{os.getpid()}/fd/{handle}")
    if nameless.exists():
        # Open for as long as this process lives, it needs no name: however that ends, nothing is left of it.
        Path(path).unlink()
        path = str(nameless)
    else:
        at_exit(_remove, path, os.getpid())
    with os.fdopen(handle, "wb", closefd=False) as file:
        file.write(content)
    _written = (config, path, handle)
    return path


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked rank runs the same exit handlers
        Path(path).unlink(missing_ok=True)


# -- The folder of a run: made for this run alone, and found again by a later attempt of the same run --
# A folder named by the time is shared by jobs that start in the same second, as those of an array do; and a
# job that Slurm requeues, or that torchrun restarts, would begin another. So the folder is claimed by
# making it, and each attempt leaves a note in it, by which the next one finds it.

_NOTE = ".attempt"
_MOST = 10_000  # folders of one name
_NO_RUN_ID = "none"  # torchrun's own where it is given none

_claimed: dict[str, str] = {}
_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)


def run_names(environ: Mapping[str, str] | None = None) -> list[tuple[str, int]]:
    """Return the names by which the attempts of this run find each other, and how many came before."""
    # There are none without a scheduler. The most specific name comes first. torchrun may run in a job of
    # Slurm: after a requeue it starts to count again, and with ``--standalone`` it has another run id.
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
    """Return the folder of this run: the one of its former attempt, or a new one called ``wanted``."""
    # Where that is taken, ``wanted-1``, ``wanted-2`` and so on are tried. The folder is made, so no other run
    # gets it. Rank 0 calls this, for all.
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
    """Let the next run of this process have its own folders."""
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
    # Checkpoints of that folder may be loaded: others may be able to make one next to it.
    with suppress(OSError, ValueError):
        own = note.stat().st_uid == note.parent.stat().st_uid == os.geteuid()
        return own and run in note.read_text(encoding="utf-8").splitlines()
    return False


def _leave_note(folder: Path) -> None:
    if names := run_names():
        # Where it cannot be written, a later attempt has its own folder.
        write_whole(folder / _NOTE, "".join(f"{name}\n" for name, _ in names))


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)
