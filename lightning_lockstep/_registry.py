"""Which strategy names ``Trainer(strategy="...")`` knows, and how each is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_lockstep._lightning import StrategyRegistry

# registry name -> (module, class, fixed arguments, one line for Lightning's listing)
_STRATEGIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "lockstep_mpi": ("strategies.mpi", "LockstepMPIStrategy", {}, "DDP over MPI, started by mpirun or srun"),
}
_START_METHODS = {
    "": ("popen", "DDP that keeps all ranks in step"),
    "_spawn": ("spawn", "lockstep_ddp with spawned ranks"),
    "_fork": ("fork", "lockstep_ddp with forked ranks"),
    "_notebook": ("fork", "lockstep_ddp for notebooks"),
}
for _suffix, (_method, _text) in _START_METHODS.items():
    _name = f"lockstep_ddp{_suffix}"
    _arguments: dict[str, Any] = {"start_method": _method}
    _STRATEGIES[_name] = ("strategies.ddp", "LockstepDDPStrategy", _arguments, _text)
    # Lightning has both for its own, and its error messages advise the first.
    for _value in (True, False):
        _STRATEGIES[f"{_name}_find_unused_parameters_{str(_value).lower()}"] = (
            "strategies.ddp",
            "LockstepDDPStrategy",
            {**_arguments, "find_unused_parameters": _value},
            f"{_text}, find_unused_parameters={_value}",
        )


def _make(module: str, name: str, **arguments: Any) -> Any:
    cls = getattr(importlib.import_module(f"lightning_lockstep.{module}"), name)
    return cls(**arguments)


def register_strategies() -> None:
    """Register every strategy by name; a strategy's own module is imported when it is first made."""
    for name, (module, cls, arguments, description) in _STRATEGIES.items():
        if name not in StrategyRegistry:
            factory: Callable[..., Any] = partial(_make, module, cls)
            StrategyRegistry.register(name, factory, description=description, **arguments)
