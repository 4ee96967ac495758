"""One callback a file: it says when, and all ranks act alike; what it does stands in the room of its feature.

The public names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._exports import exports_of, keep_old_paths, lazy

if TYPE_CHECKING:
    from lightning_lockstep.callbacks.auto_batch_size import AutoBatchSize as AutoBatchSize
    from lightning_lockstep.callbacks.consolidate_checkpoints import (
        ConsolidateCheckpoints as ConsolidateCheckpoints,
    )
    from lightning_lockstep.callbacks.early_stopping import SyncedEarlyStopping as SyncedEarlyStopping
    from lightning_lockstep.callbacks.effective_batch_size import EffectiveBatchSize as EffectiveBatchSize
    from lightning_lockstep.callbacks.fp32_modules import FP32Modules as FP32Modules
    from lightning_lockstep.callbacks.overflow_detector import OverflowDetector as OverflowDetector
    from lightning_lockstep.callbacks.rank_logging import RankOrderedLogging as RankOrderedLogging
    from lightning_lockstep.callbacks.recompile_monitor import RecompileMonitor as RecompileMonitor
    from lightning_lockstep.callbacks.static_shapes import StaticShapes as StaticShapes
    from lightning_lockstep.callbacks.stop_together import StopTogether as StopTogether
    from lightning_lockstep.callbacks.straggler_monitor import StragglerMonitor as StragglerMonitor
else:
    __all__ = sorted(exports_of("callbacks"))
    __getattr__, __dir__ = lazy(__name__, exports_of("callbacks"))

keep_old_paths("callbacks")
