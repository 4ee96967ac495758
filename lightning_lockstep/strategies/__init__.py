"""One strategy a file; the public names are loaded when first used.

For a strategy of one's own: :class:`RankLifecycle`, which it holds, with its :class:`LifecycleSettings`.
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
