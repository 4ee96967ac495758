from lightning.fabric.connector import (
    _convert_precision_to_unified_args as _convert_precision_to_unified_args,
)
from lightning.fabric.loggers.logger import rank_zero_experiment as rank_zero_experiment
from lightning.fabric.plugins import CheckpointIO as CheckpointIO
from lightning.fabric.plugins.environments import ClusterEnvironment as ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment as LightningEnvironment
from lightning.fabric.plugins.environments import LSFEnvironment as LSFEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment as SLURMEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment as TorchElasticEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port as find_free_network_port
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork as _check_bad_cuda_fork
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_missing_main_guard as _check_missing_main_guard,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _basic_subprocess_cmd as _basic_subprocess_cmd,
)
from lightning.fabric.utilities import move_data_to_device as move_data_to_device
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars as convert_tensors_to_scalars
from lightning.fabric.utilities.data import _set_sampler_epoch as _set_sampler_epoch
from lightning.fabric.utilities.data import sized_len as sized_len
from lightning.fabric.utilities.distributed import _destroy_dist_connection as _destroy_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_only
from lightning.fabric.utilities.seed import reset_seed as reset_seed
from lightning.pytorch import Callback as Callback
from lightning.pytorch import LightningDataModule as LightningDataModule
from lightning.pytorch import LightningModule as LightningModule
from lightning.pytorch import Trainer as Trainer
from lightning.pytorch import seed_everything as seed_everything
from lightning.pytorch.accelerators import Accelerator as Accelerator
from lightning.pytorch.accelerators import CPUAccelerator as CPUAccelerator
from lightning.pytorch.accelerators import XLAAccelerator as XLAAccelerator
from lightning.pytorch.callbacks import BatchSizeFinder as BatchSizeFinder
from lightning.pytorch.callbacks import Checkpoint as Checkpoint
from lightning.pytorch.callbacks import EarlyStopping as EarlyStopping
from lightning.pytorch.callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
from lightning.pytorch.callbacks import LearningRateMonitor as LearningRateMonitor
from lightning.pytorch.callbacks import ModelCheckpoint as ModelCheckpoint
from lightning.pytorch.callbacks import ModelPruning as ModelPruning
from lightning.pytorch.callbacks import OnExceptionCheckpoint as OnExceptionCheckpoint
from lightning.pytorch.callbacks import StochasticWeightAveraging as StochasticWeightAveraging
from lightning.pytorch.callbacks import WeightAveraging as WeightAveraging
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
from lightning.pytorch.core.optimizer import _configure_optimizers as _configure_optimizers
from lightning.pytorch.loggers import CSVLogger as CSVLogger
from lightning.pytorch.loggers import Logger as Logger
from lightning.pytorch.loggers import MLFlowLogger as MLFlowLogger
from lightning.pytorch.loggers import TensorBoardLogger as TensorBoardLogger
from lightning.pytorch.loggers import WandbLogger as WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter as ExperimentWriter
from lightning.pytorch.loggers.logger import DummyLogger as DummyLogger
from lightning.pytorch.loops.optimization.automatic import Closure as Closure
from lightning.pytorch.loops.optimization.automatic import ClosureResult as ClosureResult
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization as _ManualOptimization
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.precision import DeepSpeedPrecision as DeepSpeedPrecision
from lightning.pytorch.plugins.precision import DoublePrecision as DoublePrecision
from lightning.pytorch.plugins.precision import HalfPrecision as HalfPrecision
from lightning.pytorch.plugins.precision import MixedPrecision as MixedPrecision
from lightning.pytorch.plugins.precision import Precision as Precision
from lightning.pytorch.profilers import PassThroughProfiler as PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy as DDPStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy as DeepSpeedStrategy
from lightning.pytorch.strategies import ModelParallelStrategy as ModelParallelStrategy
from lightning.pytorch.strategies import ParallelStrategy as ParallelStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as SingleDeviceStrategy
from lightning.pytorch.strategies import Strategy as Strategy
from lightning.pytorch.strategies import StrategyRegistry as StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot as _GlobalStateSnapshot,
)
from lightning.pytorch.trainer.connectors.accelerator_connector import (
    _AcceleratorConnector as _AcceleratorConnector,
)
from lightning.pytorch.trainer.states import RunningStage as RunningStage
from lightning.pytorch.trainer.states import TrainerFn as TrainerFn
from lightning.pytorch.trainer.states import TrainerStatus as TrainerStatus
from lightning.pytorch.utilities import CombinedLoader as CombinedLoader
from lightning.pytorch.utilities import find_shared_parameters as find_shared_parameters
from lightning.pytorch.utilities import set_shared_parameters as set_shared_parameters
from lightning.pytorch.utilities.exceptions import MisconfigurationException as MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException as SIGTERMException
from lightning.pytorch.utilities.exceptions import _TunerExitException as _TunerExitException
from lightning.pytorch.utilities.model_helpers import is_overridden as is_overridden
from lightning.pytorch.utilities.parsing import (
    _lightning_get_all_attr_holders as _lightning_get_all_attr_holders,
)
from lightning.pytorch.utilities.seed import isolate_rng as isolate_rng
from lightning.pytorch.utilities.signature_utils import (
    is_param_in_hook_signature as is_param_in_hook_signature,
)

PYTORCH: str
FABRIC: str
NAMES: dict[str, str]
