"""lightning-lockstep keeps every rank of a distributed PyTorch Lightning run in step.

Importing this package registers its strategies with Lightning and does nothing else; the public names
are loaded when first used. In the processes of ``lockstep-doctor`` it does not even that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._exports import EXPORTS as _EXPORTS
from lightning_lockstep._exports import lazy as _lazy
from lightning_lockstep._registry import register_strategies as _register_strategies

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lightning_lockstep.batch_size.find_executable import (
        find_executable_batch_size as find_executable_batch_size,
    )
    from lightning_lockstep.callbacks import AutoBatchSize as AutoBatchSize
    from lightning_lockstep.callbacks import ConsolidateCheckpoints as ConsolidateCheckpoints
    from lightning_lockstep.callbacks import EffectiveBatchSize as EffectiveBatchSize
    from lightning_lockstep.callbacks import FP32Modules as FP32Modules
    from lightning_lockstep.callbacks import OverflowDetector as OverflowDetector
    from lightning_lockstep.callbacks import RankOrderedLogging as RankOrderedLogging
    from lightning_lockstep.callbacks import RecompileMonitor as RecompileMonitor
    from lightning_lockstep.callbacks import StaticShapes as StaticShapes
    from lightning_lockstep.callbacks import StopTogether as StopTogether
    from lightning_lockstep.callbacks import StragglerMonitor as StragglerMonitor
    from lightning_lockstep.callbacks import SyncedEarlyStopping as SyncedEarlyStopping
    from lightning_lockstep.distributed.rank_order import in_rank_order as in_rank_order
    from lightning_lockstep.distributed.uneven.gather_uneven import gather_uneven as gather_uneven
    from lightning_lockstep.errors import *  # noqa: F403
    from lightning_lockstep.logs import get_logger as get_logger
    from lightning_lockstep.notebook import notebook_launcher as notebook_launcher
    from lightning_lockstep.numerics.float32 import run_in_fp32 as run_in_fp32
    from lightning_lockstep.overflow.spots import detect_overflow as detect_overflow
    from lightning_lockstep.stopping.breakpoint import check_breakpoint as check_breakpoint
    from lightning_lockstep.stopping.breakpoint import set_breakpoint as set_breakpoint
    from lightning_lockstep.strategies import LockstepDDPStrategy as LockstepDDPStrategy
    from lightning_lockstep.strategies import LockstepDeepSpeedStrategy as LockstepDeepSpeedStrategy
    from lightning_lockstep.strategies import LockstepMPIStrategy as LockstepMPIStrategy
    from lightning_lockstep.strategies import LockstepXLASPMDStrategy as LockstepXLASPMDStrategy
    from lightning_lockstep.strategies import LockstepXLAStrategy as LockstepXLAStrategy
    from lightning_lockstep.tuner import LockstepTuner as LockstepTuner
else:
    __all__ = sorted(_EXPORTS)
    __getattr__, __dir__ = _lazy(__name__, _EXPORTS)

_register_strategies()
