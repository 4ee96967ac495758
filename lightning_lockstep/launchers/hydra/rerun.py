"""The command that starts one more rank of a Hydra program, with the configuration that rank 0 has.

Running the same command line again on every rank composes the configuration once per rank: `${now:...}` gives
each rank a folder of its own, quotes are lost on the way, and in a sweep a rank does not know which of the
jobs it belongs to. So the configuration is resolved once, on rank 0, and passed on as a file: every
`@hydra.main` program accepts `--experimental-rerun FILE`, which runs the program on a finished
configuration and creates no folder.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_lockstep._doors.hydra_internals import put_value, whole_config
from lightning_lockstep.distributed.failure.process_exit import at_exit
from lightning_lockstep.launchers.hydra.frozen_config import pickled
from lightning_lockstep.launchers.hydra.program import program_arguments

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

__all__ = [
    "current_hydra_config",
    "for_other_ranks",
    "freeze",
    "hydra_child_command",
    "inner_container",
    "without_hydra",
]

# Hydra announces the option as experimental on every use; matched from the start of its message.
_QUIET = ("-W", "ignore:Experimental rerun CLI option:UserWarning")

# The last configuration written, its path and its descriptor: all children of one job share it.
_written: tuple[DictConfig, str, int] | None = None


def current_hydra_config() -> DictConfig | None:
    """Return the whole configuration of the Hydra job that is running, the program's and Hydra's own, if any."""
    module = sys.modules.get("hydra.core.hydra_config")  # Hydra is never imported here
    if module is None or not module.HydraConfig.initialized():
        return None
    return whole_config(module.HydraConfig.instance().cfg.hydra)


def freeze(config: DictConfig) -> DictConfig:
    """Return a copy in which every interpolation is replaced by its present value.

    Types of structured configs are kept. A value that must still be given (`???`) stays so, and an
    interpolation that cannot be resolved stays as it is: only a program that reads it has a problem.
    """
    # The copy takes the resolver cache along, so `${now:...}` keeps a value it has already had.
    frozen = copy.deepcopy(config)
    _resolve_in_place(frozen)
    return frozen


def _resolve_in_place(container: Any) -> None:
    from omegaconf import OmegaConf, flag_override

    keys = list(container.keys()) if OmegaConf.is_dict(container) else range(len(container))
    for key in keys:
        # Hydra makes its own part read-only.
        with flag_override(container, ["readonly", "struct"], [False, False]):
            if OmegaConf.is_interpolation(container, key):
                put_value(container, key)
        inner = inner_container(container, key)
        if inner is not None:
            _resolve_in_place(inner)


def inner_container(container: Any, key: Any) -> DictConfig | ListConfig | None:
    """Return the dictionary or list under a key, not one that is null, `???` or an interpolation."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if OmegaConf.is_missing(container, key) or OmegaConf.is_interpolation(container, key):
        return None
    inner = container[key]
    return inner if isinstance(inner, (DictConfig, ListConfig)) else None


def for_other_ranks(frozen: DictConfig) -> DictConfig:
    """Return a copy for the ranks beside rank 0: the same values, but nothing in it writes a file."""
    from omegaconf import flag_override

    config = copy.deepcopy(frozen)
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
    content = pickled(for_other_ranks(freeze(config)))
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
