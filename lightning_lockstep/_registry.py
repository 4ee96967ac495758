"""Which strategy names ``Trainer(strategy="...")`` knows, and how each is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_lockstep._lightning import StrategyRegistry

# registry name -> (module, class, fixed arguments, one line for Lightning's listing)
_STRATEGIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "lockstep_ddp": ("strategies.ddp", "LockstepDDPStrategy", {}, "DDP that keeps all ranks in step"),
    "lockstep_ddp_spawn": (
        "strategies.ddp",
        "LockstepDDPStrategy",
        {"start_method": "spawn"},
        "lockstep_ddp with spawned ranks",
    ),
    "lockstep_ddp_fork": (
        "strategies.ddp",
        "LockstepDDPStrategy",
        {"start_method": "fork"},
        "lockstep_ddp with forked ranks",
    ),
    "lockstep_ddp_notebook": (
        "strategies.ddp",
        "LockstepDDPStrategy",
        {"start_method": "fork"},
        "lockstep_ddp for notebooks",
    ),
    "lockstep_mpi": ("strategies.mpi", "LockstepMPIStrategy", {}, "DDP over MPI, started by mpirun or srun"),
}


def _make(module: str, name: str, **arguments: Any) -> Any:
    cls = getattr(importlib.import_module(f"lightning_lockstep.{module}"), name)
    return cls(**arguments)


def register_strategies() -> None:
    """Register every strategy by name; a strategy's own module is imported when it is first made."""
    for name, (module, cls, arguments, description) in _STRATEGIES.items():
        if name not in StrategyRegistry:
            factory: Callable[..., Any] = partial(_make, module, cls)
            StrategyRegistry.register(name, factory, description=description, **arguments)
