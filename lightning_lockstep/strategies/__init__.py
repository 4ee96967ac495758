"""The strategies; the public names are loaded when first used.

| file | holds |
| --- | --- |
| `ddp`, `mpi`, `deepspeed`, `xla`, `xla_spmd` | one strategy each |
| `lifecycle` | `RankLifecycle`: what every strategy holds, also one of your own |
| `hooks` | where Lightning calls it |
| `options` | the settings: `LifecycleSettings` and those of each strategy |
| `given_environment` | the cluster environment: given, of a plugin, or detected |
| `placement` | the table of which rank runs where |
| `uneven_inputs`, `zero_loss` | ranks with different numbers of batches; losses of zero for them |
| `deepspeed_steps`, `deepspeed_checkpoints` | parts of `deepspeed` |
| `xla_steps`, `xla_pending` | what both strategies for XLA devices share |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._exports import exports_of, lazy

if TYPE_CHECKING:
    from lightning_lockstep.strategies.ddp import LockstepDDPStrategy as LockstepDDPStrategy
    from lightning_lockstep.strategies.deepspeed import LockstepDeepSpeedStrategy as LockstepDeepSpeedStrategy
    from lightning_lockstep.strategies.lifecycle import RankLifecycle as RankLifecycle
    from lightning_lockstep.strategies.mpi import LockstepMPIStrategy as LockstepMPIStrategy
    from lightning_lockstep.strategies.options import LifecycleSettings as LifecycleSettings
    from lightning_lockstep.strategies.xla import LockstepXLAStrategy as LockstepXLAStrategy
    from lightning_lockstep.strategies.xla_spmd import LockstepXLASPMDStrategy as LockstepXLASPMDStrategy
else:
    _NAMES = {
        **exports_of("strategies"),
        "LifecycleSettings": "strategies.options",
        "RankLifecycle": "strategies.lifecycle",
    }
    __all__ = sorted(_NAMES)
    __getattr__, __dir__ = lazy(__name__, _NAMES)
