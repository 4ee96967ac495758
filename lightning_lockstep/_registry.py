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

#: The commands that answer without torch and Lightning, and their modules.
_COMMANDS = ("lockstep-doctor", "lockstep-train")
_MODULES = ("lightning_lockstep.doctor", "lightning_lockstep.train")


def is_command() -> bool:
    """Return whether this process is the doctor, one that it has started, or the Hydra application, or shows help."""
    # The doctor must answer even if torch or Lightning cannot be imported, and both commands start quickly. So the
    # package registers no strategies in these processes, which would import both; a run registers them by itself.
    if "--help" in sys.argv[1:]:  # also of a user's own Hydra application
        return True
    program = sys.argv[0] if sys.argv else ""
    if program != "-m":  # what Python puts there until it has found the module of `python -m`
        return PurePath(program).name in _COMMANDS
    commands = tuple(f"{name}." for name in _MODULES)
    modules = [after for option, after in pairwise(sys.orig_argv) if option == "-m"]
    return bool(modules) and f"{modules[0]}.".startswith(commands)


# -- Which strategy names ``Trainer(strategy="...")`` knows, and how each is made --

_DDP_START_METHODS = {
    "lockstep_ddp": ("popen", "DDP that keeps all ranks in step"),
    "lockstep_ddp_spawn": ("spawn", "lockstep_ddp with spawned ranks"),
    "lockstep_ddp_fork": ("fork", "lockstep_ddp with forked ranks"),
    "lockstep_ddp_notebook": ("fork", "lockstep_ddp for notebooks"),
}


def _make(module: str, name: str, **arguments: Any) -> Any:
    cls = getattr(import_module(f"lightning_lockstep.{module}"), name)
    return cls(**arguments)


def _register(name: str, description: str, module: str, cls: str, **arguments: Any) -> None:
    # Not above: it imports torch, which the doctor's processes have to do without.
    from lightning_lockstep._lightning import StrategyRegistry

    if name not in StrategyRegistry:
        factory: Callable[..., Any] = partial(_make, module, cls)
        StrategyRegistry.register(name, factory, description=description, **arguments)


def register_strategies() -> None:
    """Register every strategy by name; a strategy's own module is imported when it is first made."""
    for name, cls, text in (
        ("mpi", "LockstepMPIStrategy", "DDP over MPI, started by mpirun or srun"),
        ("xla", "LockstepXLAStrategy", "one process for each XLA device"),
        ("xla_spmd", "LockstepXLASPMDStrategy", "one process over all XLA devices"),
    ):
        _register(f"lockstep_{name}", text, f"strategies.{name}", cls)
    deepspeed = partial(_register, module="strategies.deepspeed", cls="LockstepDeepSpeedStrategy")
    deepspeed("lockstep_deepspeed", "DeepSpeed that keeps all ranks in step")
    for stage in (1, 2, 3):
        text = f"lockstep_deepspeed, ZeRO stage {stage}"
        deepspeed(f"lockstep_deepspeed_stage_{stage}", text, stage=stage)
        parts = {"offload_optimizer": "cpu"} | ({"offload_param": "cpu"} if stage == 3 else {})
        deepspeed(f"lockstep_deepspeed_stage_{stage}_offload", f"{text}, offloaded", stage=stage, **parts)
    fsdp = partial(_register, module="strategies.fsdp", cls="LockstepFSDPStrategy")
    fsdp("lockstep_fsdp", "a model divided among the ranks by torch's fully_shard")
    fsdp("lockstep_fsdp_offload", "lockstep_fsdp, with the parts in the memory of the host", offload="cpu")
    ddp = partial(_register, module="strategies.ddp", cls="LockstepDDPStrategy")
    for name, (method, text) in _DDP_START_METHODS.items():
        ddp(name, text, start_method=method)
        # Lightning has both for its own, and its error messages advise the first.
        for value in (True, False):
            ddp(
                f"{name}_find_unused_parameters_{str(value).lower()}",
                f"{text}, find_unused_parameters={value}",
                start_method=method,
                find_unused_parameters=value,
            )
