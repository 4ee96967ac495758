"""The public names, loaded when first used, and the strategies that Lightning knows by name."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

# -- A public name stands in the stub of its package, ``__init__.pyi``; the package loads it when it is first used --
#
# What a stub names is public, and so is what a subpackage's `__init__` imports. Everything else is private.


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package for the names that its stub imports."""
    # Scientific Python's `lazy_loader` has the same function. It reads neither `import *` nor absolute paths, so that
    # two stubs would list all callbacks and errors, and if EAGER_IMPORT is set it loads torch, which the doctor's
    # processes must do without.
    modules: dict[str, str] = {}
    for node in ast.parse(Path(file).with_suffix(".pyi").read_bytes()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names = import_module(node.module).__all__ if alias.name == "*" else [alias.name]
                modules |= dict.fromkeys(names, node.module)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *modules}), sorted(modules)


def public(name: str) -> Any:
    """Return what the package exports as ``name``, for a subpackage below the one that defines it."""
    return getattr(sys.modules["lightning_lockstep"], name)


# -- Which program this process is, as far as an import of the package has to know --

#: The commands that answer without torch and Lightning, and their modules, each with a dot at its end.
_COMMANDS = ("lockstep-doctor", "lockstep-train")
_MODULES = ("lightning_lockstep.doctor.", "lightning_lockstep.train.")


def is_command() -> bool:
    """Return whether this process is the doctor, one that it has started, or the Hydra application, or shows help."""
    # The doctor must answer even if torch or Lightning cannot be imported, and both commands start quickly. So the
    # package registers no strategies in these processes, which would import both; a run registers them by itself.
    if "--help" in sys.argv[1:]:  # also of a user's own Hydra application
        return True
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":  # what Python puts there until it has found the module of `python -m`
        return PurePath(program).name in _COMMANDS
    modules = [after for option, after in pairwise(sys.orig_argv) if option == "-m"]
    return bool(modules) and f"{modules[0]}.".startswith(_MODULES)


# -- Which strategy names ``Trainer(strategy="...")`` knows, and how each is made --


def _make(cls: str, **arguments: Any) -> Any:
    return public(cls)(**arguments)


def register_strategies() -> None:
    """Register every strategy by name; a strategy's own module is imported when it is first made."""
    # Not above: it imports torch, which the doctor's processes have to do without.
    from lightning_lockstep._lightning import StrategyRegistry

    ddp, deepspeed, fsdp = "LockstepDDPStrategy", "LockstepDeepSpeedStrategy", "LockstepFSDPStrategy"
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "mpi": ("LockstepMPIStrategy", {}),
        "xla": ("LockstepXLAStrategy", {}),
        "xla_spmd": ("LockstepXLASPMDStrategy", {}),
        "fsdp": (fsdp, {}),
        "fsdp_offload": (fsdp, {"offload": "cpu"}),
        "deepspeed": (deepspeed, {}),
    }
    for stage in (1, 2, 3):
        parts = {"offload_optimizer": "cpu"} | ({"offload_param": "cpu"} if stage == 3 else {})
        known[f"deepspeed_stage_{stage}"] = deepspeed, {"stage": stage}
        known[f"deepspeed_stage_{stage}_offload"] = deepspeed, {"stage": stage, **parts}
    for suffix, method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        known[f"ddp{suffix}"] = ddp, {"start_method": method}
        # Lightning has both for its own, and its error messages advise the first.
        for value in (True, False):
            given = {"start_method": method, "find_unused_parameters": value}
            known[f"ddp{suffix}_find_unused_parameters_{str(value).lower()}"] = ddp, given
    for name, (cls, arguments) in known.items():
        if f"lockstep_{name}" not in StrategyRegistry:
            StrategyRegistry.register(f"lockstep_{name}", partial(_make, cls), **arguments)
