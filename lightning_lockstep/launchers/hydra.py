"""A Hydra program started again as further ranks, with the frozen configuration of rank 0.

rank 0, for each further rank                      the process of that rank, on any host
-----------------------------                      -------------------------------------
hydra_child_command                    command     _RECEIVE: the variable into a file without a name
  for_other_ranks, config_to_text    ----------->  this program with --experimental-rerun FILE
  program_arguments                    variable    Hydra: received_config, config_from_text
"""

from __future__ import annotations

import base64
import copy
import enum
import importlib
import json
import operator
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_lockstep._settings import RANK_CONFIG
from lightning_lockstep.errors import LaunchError

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig


# -- The command that starts one more rank of a Hydra program, with the configuration that rank 0 has --
# Other ranks get it in an environment variable, which mpirun also carries to other hosts: a file would have to lie in a
# folder that all hosts share, where others may replace it, and a forced end would leave it behind. Every `@hydra.main`
# program accepts `--experimental-rerun FILE`, which runs the program on a finished configuration and creates no folder.
# Hydra unpickles that file, so it begins with a pickle of one call, which is the same for all jobs: the rest is text.

# Hydra warns at each use that the option is experimental; `-W` compares the start of the message.
_QUIET = ("-W", "ignore:Experimental rerun CLI option:UserWarning")
_LONGEST = 120_000  # Linux takes variables of up to 128 KiB

# `received_config()`, as a pickle.
_CALL = f"c{__name__}\nreceived_config\n)R.".encode()
# Hydra's option wants a path: that of a file without a name, in the process that runs the program.
_RECEIVE = f"""
import base64, os, sys, tempfile, zlib
file = tempfile.TemporaryFile(buffering=0)
file.write({_CALL!r} + zlib.decompress(base64.b64decode(os.environ.pop({RANK_CONFIG!r}))))
file.seek(0)
os.set_inheritable(file.fileno(), True)
os.execv(sys.argv[1], [*sys.argv[1:], "--experimental-rerun", "/dev/fd/%d" % file.fileno()])
"""


def hydra_child_command() -> tuple[list[str], str | None, dict[str, str]] | None:
    """Return (command, folder, variables) that starts another rank of the Hydra job that is running, on any host."""
    config = current_hydra_config()
    if config is None:
        return None
    program, folder = program_arguments(str(config.hydra.runtime.cwd))
    text = config_to_text(for_other_ranks(config), with_classes=True)
    packed = base64.b64encode(zlib.compress(text.encode())).decode()
    if len(packed) > _LONGEST:
        raise LaunchError(
            f"The configuration of this job takes {len(packed):,} bytes when packed: expected at most {_LONGEST:,}, the"
            " most that other ranks can be given. Keep long lists in a file that the configuration names, or start the"
            " ranks with torchrun or mpirun."
        )
    interpreter = [sys.executable, *subprocess._args_from_interpreter_flags(), *_QUIET]  # type: ignore[attr-defined]
    command = [sys.executable, "-I", "-c", _RECEIVE, *interpreter, *program]
    return command, folder, {RANK_CONFIG: packed}


def received_config() -> DictConfig | None:
    """Return the configuration that rank 0 has given this rank, in the file that the command line names."""
    file = Path(sys.argv[sys.argv.index("--experimental-rerun") + 1])
    return config_from_text(file.read_bytes().removeprefix(_CALL).decode())


def current_hydra_config() -> DictConfig | None:
    """Return the whole configuration of the Hydra job that is running, the program's and Hydra's own, if any."""
    module = sys.modules.get("hydra.core.hydra_config")  # Hydra is never imported here
    if module is None or not module.HydraConfig.initialized():
        return None
    # Hydra keeps the program's part as the hidden parent of its own part, for interpolations between the two.
    whole: DictConfig = module.HydraConfig.instance().cfg.hydra._get_parent()
    return whole


# -- What runs this program again --

# The command of the program that has sent this process its job, if a launcher of sweeps (joblib, submitit) has.
_sender: tuple[list[str], str | None] | None = None


def set_sender(program: tuple[list[str], str | None] | None) -> None:
    """Have further ranks started with the command of the program that has sent this process its job."""
    global _sender
    _sender = program


def program_arguments(started_in: str) -> tuple[list[str], str | None]:
    """Return the arguments with which the interpreter runs this program again, and in which folder."""
    if _sender is not None:
        return _sender
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


# -- A configuration, frozen for other ranks --


def freeze(config: Any) -> Any:
    """Replace every interpolation by its present value, in the configuration itself; return it."""
    # Types of structured configs are kept. A value that must still be given (`???`) stays so, and an interpolation
    # that cannot be resolved stays as it is: only a program that reads it has a problem. OmegaConf.resolve would raise.
    # A copy takes the resolver cache along, so `${now:...}` keeps in it a value that it has already had.
    from omegaconf import OmegaConf, flag_override
    from omegaconf.errors import OmegaConfBaseException

    keys = list(config.keys()) if OmegaConf.is_dict(config) else range(len(config))
    with flag_override(config, ["readonly", "struct"], [False, False]):  # Hydra's own part is read-only
        for key in keys:
            with suppress(OmegaConfBaseException):  # an interpolation may name a value that nobody gave
                if OmegaConf.is_interpolation(config, key):
                    config[key] = config[key]
            if (inner := inner_container(config, key)) is not None:
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


# -- A frozen configuration as text, for ranks that do not read the command line --


def config_to_text(config: DictConfig | None, *, with_classes: bool = False) -> str:
    """Return a configuration as text, with enums, and with dataclasses if ``with_classes``; without Hydra's own."""
    from omegaconf import OmegaConf

    if config is None:
        return ""
    types = [one for one in _types_in(config) if with_classes or one[3]]
    return json.dumps([OmegaConf.to_yaml(config), OmegaConf.is_struct(config), types])


def _types_in(container: Any, key: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield what YAML leaves out, outermost first: key, module and class of dataclasses and members of enumerations."""
    # The last entry is the name of the member; that of a dataclass is empty.
    from omegaconf import OmegaConf

    kind = OmegaConf.get_type(container)
    if kind not in (None, dict, list):
        yield key, kind.__module__, kind.__qualname__, ""
    for name in container if OmegaConf.is_dict(container) else range(len(container)):
        if OmegaConf.is_missing(container, name) or OmegaConf.is_interpolation(container, name):
            continue
        inner, value = f"{key}[{name}]", container[name]
        if OmegaConf.is_config(value) and inner != "[hydra]":
            yield from _types_in(value, inner)
        elif isinstance(value, enum.Enum):
            yield inner, type(value).__module__, type(value).__qualname__, value.name


def config_from_text(text: str) -> DictConfig | None:
    """Return what :func:`config_to_text` was given; dataclasses that the text does not name become dictionaries."""
    from hydra.conf import HydraConf
    from omegaconf import OmegaConf

    if not text:
        return None
    values, is_struct, types = json.loads(text)
    config: DictConfig = OmegaConf.create(values)
    classes = [(key, module, name) for key, module, name, member in types if not member]
    # Dictionaries become the dataclasses that they were, the outermost first.
    for key, module, name in classes:
        given = OmegaConf.select(OmegaConf.create(values), key)
        typed: Any = OmegaConf.structured(operator.attrgetter(name)(importlib.import_module(module)))
        for inner, *_ in classes:  # `++` may have given them keys that the class does not have
            node = OmegaConf.select(typed, inner.removeprefix(key)) if inner.startswith(key) else None
            if node is not None:
                OmegaConf.set_struct(node, False)
        typed = OmegaConf.merge(typed, given)
        for missing in [one for one in given if OmegaConf.is_missing(given, one)]:
            typed[missing] = "???"  # else it would have the default of the class
        if key:
            OmegaConf.update(config, key, typed, merge=False)
        else:
            config = typed
    # Texts become the members of enumerations that they were.
    for key, module, name, member in types:
        if member:
            kind: Any = operator.attrgetter(name)(importlib.import_module(module))
            OmegaConf.update(config, key, kind[member])
    # From here on the dataclasses accept no other keys.
    for key, *_ in classes:
        OmegaConf.set_struct(OmegaConf.select(config, key), None)
    if "hydra" in config:  # Hydra accepts only its own dataclass
        own = OmegaConf.structured(HydraConf)
        OmegaConf.set_struct(own, False)
        config.hydra = OmegaConf.merge(own, config.hydra)
        OmegaConf.set_struct(config.hydra, None)
    OmegaConf.set_struct(config, is_struct or None)
    return config
