"""Which strategy names ``Trainer(strategy="...")`` knows, and how each is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_lockstep._program import is_doctor

_DDP_START_METHODS = {
    "lockstep_ddp": ("popen", "DDP that keeps all ranks in step"),
    "lockstep_ddp_spawn": ("spawn", "lockstep_ddp with spawned ranks"),
    "lockstep_ddp_fork": ("fork", "lockstep_ddp with forked ranks"),
    "lockstep_ddp_notebook": ("fork", "lockstep_ddp for notebooks"),
}


def _make(module: str, name: str, **arguments: Any) -> Any:
    cls = getattr(importlib.import_module(f"lightning_lockstep.{module}"), name)
    return cls(**arguments)


def _register(name: str, description: str, module: str, cls: str, **arguments: Any) -> None:
    # Not above: it imports torch, which the doctor's processes have to do without.
    from lightning_lockstep._lightning import StrategyRegistry

    if name not in StrategyRegistry:
        factory: Callable[..., Any] = partial(_make, module, cls)
        StrategyRegistry.register(name, factory, description=description, **arguments)


def register_strategies() -> None:
    """Register every strategy by name; a strategy's own module is imported when it is first made.

    The processes of the doctor train nothing, and have to work where Lightning cannot be imported: there none is.
    """
    if is_doctor():
        return
    _register(
        "lockstep_mpi", "DDP over MPI, started by mpirun or srun", "strategies.mpi", "LockstepMPIStrategy"
    )
    _register("lockstep_xla", "one process for each XLA device", "strategies.xla", "LockstepXLAStrategy")
    _register(
        "lockstep_xla_spmd",
        "one process over all XLA devices",
        "strategies.xla_spmd",
        "LockstepXLASPMDStrategy",
    )
    deepspeed = partial(_register, module="strategies.deepspeed", cls="LockstepDeepSpeedStrategy")
    deepspeed("lockstep_deepspeed", "DeepSpeed that keeps all ranks in step")
    for stage in (1, 2, 3):
        text = f"lockstep_deepspeed, ZeRO stage {stage}"
        deepspeed(f"lockstep_deepspeed_stage_{stage}", text, stage=stage)
        parts = {"offload_optimizer": "cpu"} | ({"offload_param": "cpu"} if stage == 3 else {})
        deepspeed(f"lockstep_deepspeed_stage_{stage}_offload", f"{text}, offloaded", stage=stage, **parts)
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
