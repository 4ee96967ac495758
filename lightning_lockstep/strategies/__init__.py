"""One strategy a file; the public names are loaded when first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._exports import exports_of, lazy

if TYPE_CHECKING:
    from lightning_lockstep.strategies.ddp import LockstepDDPStrategy as LockstepDDPStrategy
    from lightning_lockstep.strategies.deepspeed import LockstepDeepSpeedStrategy as LockstepDeepSpeedStrategy
    from lightning_lockstep.strategies.mpi import LockstepMPIStrategy as LockstepMPIStrategy
    from lightning_lockstep.strategies.xla import LockstepXLAStrategy as LockstepXLAStrategy
    from lightning_lockstep.strategies.xla_spmd import LockstepXLASPMDStrategy as LockstepXLASPMDStrategy
else:
    __all__ = sorted(exports_of("strategies"))
    __getattr__, __dir__ = lazy(__name__, exports_of("strategies"))
