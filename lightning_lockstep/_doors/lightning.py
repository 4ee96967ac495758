"""The one door through which every Lightning name comes.

Lightning is published twice, as ``lightning`` (``lightning.pytorch``) and as ``pytorch_lightning``. Their
classes are distinct, and a Trainer accepts only those of its own family. So this module takes the family
that the program has already imported, and ``lightning`` where it has imported neither.

Public names are listed first. Each private name says why it is needed; the private attributes and methods of
Lightning's objects are in :mod:`lightning_lockstep._doors.lightning_internals`. ``python -m
lightning_lockstep._doors.lightning`` lists all of them. A test looks for each in both families, so that a new Lightning
release which moves one fails there and nowhere else.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any


def _chosen_family() -> tuple[str, str]:
    if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


PYTORCH, FABRIC = _chosen_family()

# name here -> family, module and name there
_PUBLIC: dict[str, str] = {
    "Trainer": "pytorch.Trainer",
    "LightningModule": "pytorch.LightningModule",
    "LightningDataModule": "pytorch.LightningDataModule",
    "Callback": "pytorch.Callback",
    "seed_everything": "pytorch.seed_everything",
    "BatchSizeFinder": "pytorch.callbacks.BatchSizeFinder",
    "EarlyStopping": "pytorch.callbacks.EarlyStopping",
    "EarlyStoppingReason": "pytorch.callbacks.early_stopping.EarlyStoppingReason",
    "Checkpoint": "pytorch.callbacks.Checkpoint",
    "ModelCheckpoint": "pytorch.callbacks.ModelCheckpoint",
    "LearningRateMonitor": "pytorch.callbacks.LearningRateMonitor",
    "CSVLogger": "pytorch.loggers.CSVLogger",
    "Logger": "pytorch.loggers.Logger",
    "MLFlowLogger": "pytorch.loggers.MLFlowLogger",
    "TensorBoardLogger": "pytorch.loggers.TensorBoardLogger",
    "WandbLogger": "pytorch.loggers.WandbLogger",
    "DDPStrategy": "pytorch.strategies.DDPStrategy",
    "DeepSpeedStrategy": "pytorch.strategies.DeepSpeedStrategy",
    "CPUAccelerator": "pytorch.accelerators.CPUAccelerator",
    "XLAAccelerator": "pytorch.accelerators.XLAAccelerator",
    "ParallelStrategy": "pytorch.strategies.ParallelStrategy",
    "Strategy": "pytorch.strategies.Strategy",
    "SingleDeviceStrategy": "pytorch.strategies.SingleDeviceStrategy",
    "StrategyRegistry": "pytorch.strategies.StrategyRegistry",
    "Precision": "pytorch.plugins.precision.Precision",
    "MixedPrecision": "pytorch.plugins.precision.MixedPrecision",
    "HalfPrecision": "pytorch.plugins.precision.HalfPrecision",
    "DoublePrecision": "pytorch.plugins.precision.DoublePrecision",
    "DeepSpeedPrecision": "pytorch.plugins.precision.DeepSpeedPrecision",
    "Tuner": "pytorch.tuner.Tuner",
    "TrainerFn": "pytorch.trainer.states.TrainerFn",
    "RunningStage": "pytorch.trainer.states.RunningStage",
    "SIGTERMException": "pytorch.utilities.exceptions.SIGTERMException",
    "CombinedLoader": "pytorch.utilities.CombinedLoader",
    "DummyLogger": "pytorch.loggers.logger.DummyLogger",
    "PassThroughProfiler": "pytorch.profilers.PassThroughProfiler",
    "move_data_to_device": "fabric.utilities.move_data_to_device",
    "find_shared_parameters": "pytorch.utilities.find_shared_parameters",
    "set_shared_parameters": "pytorch.utilities.set_shared_parameters",
    "MisconfigurationException": "pytorch.utilities.exceptions.MisconfigurationException",
    "ClusterEnvironment": "fabric.plugins.environments.ClusterEnvironment",
    "LightningEnvironment": "fabric.plugins.environments.LightningEnvironment",
    "LSFEnvironment": "fabric.plugins.environments.LSFEnvironment",
    "SLURMEnvironment": "fabric.plugins.environments.SLURMEnvironment",
    "TorchElasticEnvironment": "fabric.plugins.environments.TorchElasticEnvironment",
    "rank_zero_experiment": "fabric.loggers.logger.rank_zero_experiment",
    "rank_zero_only": "fabric.utilities.rank_zero.rank_zero_only",
    "reset_seed": "fabric.utilities.seed.reset_seed",
}

# name here -> (family, module and name there; why it is needed)
_PRIVATE: dict[str, tuple[str, str]] = {
    "_SubprocessScriptLauncher": (
        "pytorch.strategies.launchers._SubprocessScriptLauncher",
        "decides how ranks are started by running the program again; there is no public way",
    ),
    "_MultiProcessingLauncher": (
        "pytorch.strategies.launchers._MultiProcessingLauncher",
        "decides how ranks are spawned or forked; there is no public way",
    ),
    "_GlobalStateSnapshot": (
        "pytorch.strategies.launchers.multiprocessing._GlobalStateSnapshot",
        "spawned ranks restore these globals as Lightning's own launcher does",
    ),
    "_check_bad_cuda_fork": (
        "fabric.strategies.launchers.multiprocessing._check_bad_cuda_fork",
        "fork needs that CUDA was not initialized; Lightning checks it with this",
    ),
    "_check_missing_main_guard": (
        "fabric.strategies.launchers.multiprocessing._check_missing_main_guard",
        "spawn needs a main guard in the script; Lightning checks it with this",
    ),
    "_basic_subprocess_cmd": (
        "fabric.strategies.launchers.subprocess_script._basic_subprocess_cmd",
        "the command that runs this program again; one of our own would drift from Lightning's",
    ),
    "_register_ddp_comm_hook": (
        "pytorch.overrides.distributed._register_ddp_comm_hook",
        "registers a gradient compression hook, which Lightning itself does on CUDA only",
    ),
    "_destroy_dist_connection": (
        "fabric.utilities.distributed._destroy_dist_connection",
        "Lightning calls it at exit for nccl; after a failure it must not run, since it waits for peers",
    ),
    "_AcceleratorConnector": (
        "pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
        "turns fp16 on CPU into bf16; its frame still holds the arguments as the user gave them",
    ),
    "_convert_precision_to_unified_args": (
        "fabric.connector._convert_precision_to_unified_args",
        'turns 16, "16", "bf16" and the like into the one name that Lightning documents',
    ),
    "_extract_batch_size": (
        "pytorch.utilities.data.extract_batch_size",
        "counts the samples of a batch of any structure as Lightning does for its logged means",
    ),
    "_lightning_get_all_attr_holders": (
        "pytorch.utilities.parsing._lightning_get_all_attr_holders",
        "finds a batch size in the module, the data module or their hparams, in Lightning's order",
    ),
    "_AutomaticOptimization": (
        "pytorch.loops.optimization.automatic._AutomaticOptimization",
        "a batch that does not fit is run again within its optimizer step, which only this loop knows",
    ),
    "_ManualOptimization": (
        "pytorch.loops.optimization.manual._ManualOptimization",
        "runs a step of a module with manual optimization apart from the run",
    ),
    "_Closure": (
        "pytorch.loops.optimization.automatic.Closure",
        "the step, zero_grad and backward of one batch, as automatic optimization runs them",
    ),
    "_ClosureResult": (
        "pytorch.loops.optimization.automatic.ClosureResult",
        "what automatic optimization takes from a closure",
    ),
    "_TunerExitException": (
        "pytorch.utilities.exceptions._TunerExitException",
        "ends a run that was only to find a batch size or a learning rate; the Trainer takes it for a success",
    ),
    # -- add further private names here, each with the reason --
}


def _resolve(path: str) -> Any:
    family, _, rest = path.partition(".")
    module, _, name = rest.rpartition(".")
    root = PYTORCH if family == "pytorch" else FABRIC
    return getattr(importlib.import_module(f"{root}.{module}" if module else root), name)


if TYPE_CHECKING:
    from lightning.fabric.connector import _convert_precision_to_unified_args
    from lightning.fabric.loggers.logger import rank_zero_experiment
    from lightning.fabric.plugins.environments import (
        ClusterEnvironment,
        LightningEnvironment,
        LSFEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )
    from lightning.fabric.strategies.launchers.multiprocessing import (
        _check_bad_cuda_fork,
        _check_missing_main_guard,
    )
    from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.distributed import _destroy_dist_connection
    from lightning.fabric.utilities.rank_zero import rank_zero_only
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
    from lightning.pytorch.accelerators import CPUAccelerator, XLAAccelerator
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        Checkpoint,
        EarlyStopping,
        LearningRateMonitor,
        ModelCheckpoint,
    )
    from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
    from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from lightning.pytorch.loggers.logger import DummyLogger
    from lightning.pytorch.loops.optimization.automatic import Closure as _Closure
    from lightning.pytorch.loops.optimization.automatic import ClosureResult as _ClosureResult
    from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
    from lightning.pytorch.loops.optimization.manual import _ManualOptimization
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.plugins.precision import (
        DeepSpeedPrecision,
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.profilers import PassThroughProfiler
    from lightning.pytorch.strategies import (
        DDPStrategy,
        DeepSpeedStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
        Strategy,
        StrategyRegistry,
    )
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
    from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
    from lightning.pytorch.trainer.states import RunningStage, TrainerFn
    from lightning.pytorch.tuner import Tuner
    from lightning.pytorch.utilities import CombinedLoader, find_shared_parameters, set_shared_parameters
    from lightning.pytorch.utilities.data import extract_batch_size as _extract_batch_size
    from lightning.pytorch.utilities.exceptions import (
        MisconfigurationException,
        SIGTERMException,
        _TunerExitException,
    )
    from lightning.pytorch.utilities.parsing import _lightning_get_all_attr_holders
else:
    globals().update({name: _resolve(path) for name, path in _PUBLIC.items()})
    globals().update({name: _resolve(path) for name, (path, _) in _PRIVATE.items()})
