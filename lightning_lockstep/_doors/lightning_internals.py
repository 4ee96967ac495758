"""What callbacks that take the place of Lightning's have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from lightning_lockstep._doors.lightning import (
    MisconfigurationException,
    Trainer,
    TrainerFn,
    _AcceleratorConnector,
    _IndexBatchSamplerWrapper,
)
from lightning_lockstep.errors import ConfigurationError

# -- torch's classes of data loaders, as they are without what Lightning puts around them for a moment --


def restore_data_classes() -> None:
    """Undo what Lightning does to ``DataLoader`` and ``BatchSampler`` while it asks a program for its loaders."""
    # ``_replace_dunder_methods`` of ``lightning.fabric.utilities.data`` leaves its replacements in place when the
    # program's hook raises: the next run in the process then refuses ``predict`` with ``DataLoader(dataset, 4)``.
    for base in (DataLoader, BatchSampler):
        for cls in (base, *_subclasses(base)):
            for name in ("__init__", "__setattr__", "__delattr__"):
                method = vars(cls).get(name)
                if (own := _without_notes(method)) is not method:
                    setattr(cls, name, own)
                if f"__old{name}" in vars(cls):
                    delattr(cls, f"__old{name}")


def _subclasses(cls: type) -> Iterator[type]:
    below: list[type] = cls.__subclasses__()
    for one in below:
        yield one
        yield from _subclasses(one)


def _without_notes(method: Any) -> Any:
    """Return the class's own method; of two runs that failed, each has put a layer around it."""
    while getattr(method, "__globals__", {}).get("__name__", "").endswith("fabric.utilities.data"):
        method = method.__wrapped__
    return method


# -- The private attributes and methods of Lightning's objects that this package uses, each with its reason
# No other module touches them. A function here names what it touches (``@touches("Class.attribute",
# why=...)``); what our subclasses override or read of their Lightning base is listed in :data:`INHERITED`.
# A test looks for each name in real objects of both families, so that a release which moves one fails there
# and nowhere else. ``python -m lightning_lockstep._doors`` prints the list.

_F = TypeVar("_F", bound=Callable[..., Any])

# Lightning class -> module below lightning.pytorch
OWNERS: dict[str, str] = {
    "Trainer": "",
    "LightningModule": "",
    "LightningOptimizer": "core.optimizer",
    "Strategy": "strategies",
    "DDPStrategy": "strategies",
    "SingleDeviceStrategy": "strategies",
    "DeepSpeedStrategy": "strategies",
    "BatchSizeFinder": "callbacks",
    "EarlyStopping": "callbacks",
    "MLFlowLogger": "loggers",
    "WandbLogger": "loggers",
    "_FitLoop": "loops.fit_loop",
    "_EvaluationLoop": "loops.evaluation_loop",
    "_PredictionLoop": "loops.prediction_loop",
    "_TrainingEpochLoop": "loops.training_epoch_loop",
    "_AutomaticOptimization": "loops.optimization.automatic",
    "Closure": "loops.optimization.automatic",
    "CombinedLoader": "utilities",
    "_IndexBatchSamplerWrapper": "overrides.distributed",
    "_MaxSizeCycle": "utilities.combined_loader",
    "_SignalConnector": "trainer.connectors.signal_connector",
    "_CheckpointConnector": "trainer.connectors.checkpoint_connector",
    "_LoggerConnector": "trainer.connectors.logger_connector",
    "_ResultCollection": "trainer.connectors.logger_connector.result",
    "_ResultMetric": "trainer.connectors.logger_connector.result",
    "_SubprocessScriptLauncher": "strategies.launchers",
    "_MultiProcessingLauncher": "strategies.launchers",
}

# "Class.attribute" -> why it is needed; filled by the decorator below
TOUCHED: dict[str, str] = {}

# "Class.attribute" that a subclass of ours overrides or uses on itself -> why it is needed
INHERITED: dict[str, str] = {
    "Strategy._configure_launcher": "the Trainer asks a strategy for its launcher by this method",
    "Strategy._launcher": "where Lightning looks for the launcher of a strategy",
    "DDPStrategy._layer_sync": "what sync_batchnorm=True asks for, done before a model is divided",
    "DeepSpeedStrategy._init_config_if_needed": "the configuration is completed from the Trainer by our rules",
    "DeepSpeedStrategy._init_optimizers": "where several optimizers are refused, which we say more about",
    "DeepSpeedStrategy._setup_model_and_optimizer": "Lightning's gives DeepSpeed no index of a CPU, which it needs",
    "DeepSpeedStrategy._initialize_deepspeed_inference": "as above; and it takes all hooks off the user's modules",
    "DeepSpeedStrategy._set_deepspeed_activation_checkpointing": "Lightning's does not hand over all of its options",
    "BatchSizeFinder._early_exit": "the Tuner sets it, so that the run ends with the search",
    "EarlyStopping._evaluate_stopping_criteria": "Lightning's rule, asked with the one value of all ranks",
    "EarlyStopping._log_info": "prints the reason of a stop as Lightning does",
    "EarlyStopping._run_early_stopping_check": "the moment at which Lightning looks at the monitored value",
    "MLFlowLogger._initialized": "whether the run at the store has begun",
    "MLFlowLogger._mlflow_client": "the connection to the store, made when rank 0 needs it",
    "MLFlowLogger._tracking_uri": "where the run will be logged",
    "WandbLogger._experiment": "the run of wandb, if it has begun; the public property begins one",
    "WandbLogger._wandb_init": "holds an argument that wandb warns of whatever its value",
    "_SubprocessScriptLauncher._check_can_spawn_children": "refuses to start ranks from a rank",
    "_MultiProcessingLauncher._already_fit": "refuses a second fit, whose optimizers stayed in the ranks",
    "_MultiProcessingLauncher._recover_results_in_main_process": "brings weights and metrics back from rank 0",
    "_MultiProcessingLauncher._start_method": "how ranks are started",
    "_MultiProcessingLauncher._strategy": "the strategy that goes to the ranks",
    "_MultiProcessingLauncher._wrapping_function": "what runs in a started rank, with its results collected",
}


def touches(*names: str, why: str) -> Callable[[_F], _F]:
    """Note which private names a function touches, each as ``Class.attribute``, and why it is needed."""

    def note(function: _F) -> _F:
        TOUCHED.update(dict.fromkeys(names, why))
        return function

    return note


# -- strategies, numerics --


def given_to_trainer(name: str) -> Any:
    """Return an argument of the Trainer under construction as the user gave it, or ``None`` without one."""
    # By the time a strategy is asked, the Trainer's connector has overwritten what it changed its mind about,
    # and the Trainer has not kept the others yet; an argument is left only in the frame that received it.
    codes = _AcceleratorConnector.__init__.__code__, Trainer.__init__.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            # The Trainer's own frame is a wrapper, which has only what was given.
            given = frame.f_locals.get("kwargs", frame.f_locals)
            if name in given:
                return given[name]
        frame = frame.f_back  # type: ignore[assignment]
    return None


def show_accelerator(accelerator: Any) -> None:
    """Have the Trainer under construction check another accelerator than the strategy's own."""
    # It accepts its accelerator for TPU only with its own two strategies for it.
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _AcceleratorConnector.__init__.__code__:
            frame.f_locals["self"].accelerator = accelerator
            return
        frame = frame.f_back  # type: ignore[assignment]


@touches(
    "Trainer._run", why="Lightning forgets weights_only of a run in which weights are loaded after setup"
)
def weights_only_of_run(given: bool | None) -> bool | None:
    """Return ``weights_only`` as it was given to a strategy, or else to the run of the Trainer."""
    frame = sys._getframe(1)
    while given is None and frame is not None:
        if frame.f_code is Trainer._run.__code__:
            return frame.f_locals.get("weights_only")
        frame = frame.f_back  # type: ignore[assignment]
    return given


@touches("LightningModule._device_mesh", why="what a module's own configure_model divides it over")
def give_device_mesh(module: Any, mesh: Any) -> None:
    """Let a module know the mesh of the ranks, as ``module.device_mesh``."""
    module._device_mesh = mesh


@touches(
    "_FitLoop._should_reload_train_dl",
    why="distinguishes the training loader from one of a validation inside a fit",
)
def asks_for_training_loader(trainer: Any) -> bool:
    """Return whether the loader in hand is one of the fit loop's own, not one of a validation inside it."""
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or not trainer.training:
        return False
    return trainer.train_dataloader is None or bool(trainer.fit_loop._should_reload_train_dl)


@touches(
    "_FitLoop._combined_loader",
    "CombinedLoader._mode",
    why="how many batches an epoch has where several loaders are taken together",
)
def combined_training_loader(trainer: Any) -> tuple[int, str] | None:
    """Return how many loaders the fit loop takes together, and how; ``None`` until it has asked for all."""
    combined = trainer.fit_loop._combined_loader
    return None if combined is None else (len(combined.flattened), combined._mode)


# -- launchers --


@touches(
    "_TrainingEpochLoop._broadcast_sigterm_tensor",
    why="Lightning broadcasts a termination flag before every batch; this rank looks at its own instead",
)
def call_before_each_batch(trainer: Any, function: Callable[[], None]) -> None:
    """Have ``function`` called before every training batch, in place of Lightning's broadcast."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = function


@touches(
    "Trainer._signal_connector",
    "_SignalConnector._sigterm_notifier_fn",
    why="Lightning broadcasts inside its SIGTERM handler, which pairs up with whatever the others are doing",
)
def call_on_sigterm(trainer: Any, function: Callable[..., None]) -> None:
    """Have ``function`` called on SIGTERM, in place of Lightning's handler."""
    trainer._signal_connector._sigterm_notifier_fn = function


@touches("Trainer._signal_connector", why="trainer.received_sigterm can only be read")
def mark_sigterm_received(trainer: Any) -> None:
    """Make ``trainer.received_sigterm`` true."""
    trainer._signal_connector.received_sigterm = True


# -- steps --


@touches("Strategy._lightning_optimizers", why="a step apart from the run must not count as one of the run's")
@touches(
    "LightningOptimizer._on_before_step",
    "LightningOptimizer._on_after_step",
    why="manual optimization counts steps in these, and takes them away at the end of each",
)
def optimizer_step_hooks(strategy: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return each of Lightning's optimizers with the attributes that a run of a step changes."""
    return [
        (o, {"_on_before_step": o._on_before_step, "_on_after_step": o._on_after_step})
        for o in strategy._lightning_optimizers
    ]


@touches("DDPStrategy._model_averager", why="averages the parameters of all ranks after an optimizer step")
def no_model_averaging(strategy: Any) -> dict[str, None]:
    """Return the attributes with which a strategy does not average parameters."""
    return {"_model_averager": None} if hasattr(strategy, "_model_averager") else {}


@touches("LightningModule._param_requires_grad_state", why="flags of the parameters before a toggle")
def untoggled_flags(module: Any) -> dict[Any, bool]:
    """Return ``requires_grad`` of the parameters that a toggled optimizer has changed, as it was before."""
    return dict(getattr(module, "_param_requires_grad_state", {}))


@touches("_AutomaticOptimization._make_step_fn", why="the forward part of Lightning's closure")
@touches("_AutomaticOptimization._make_backward_fn", why="the backward part of Lightning's closure")
def closure_parts(loop: Any, optimizer: Any) -> dict[str, Any]:
    """Return the forward and backward parts of a closure, which calls ``training_step`` without arguments."""
    return {"step_fn": loop._make_step_fn({}), "backward_fn": loop._make_backward_fn(optimizer)}


# -- overflow --


@touches(
    "DDPStrategy._model_averaging_period", why="whether gradients are reduced at all; no public attribute"
)
def averages_models(strategy: Any) -> bool:
    """Return whether a strategy averages the ranks' models now and then instead of their gradients."""
    return bool(getattr(strategy, "_model_averaging_period", None))


@touches("LightningModule._compiler_ctx", why="whether torch.compile compiled the LightningModule itself")
def is_compiled(module: Any) -> bool:
    """Return whether ``torch.compile`` compiled this LightningModule."""
    return getattr(module, "_compiler_ctx", None) is not None


# -- batch_size --


@touches(
    "_FitLoop._data_source",
    why="where a loop gets its loaders from",
)
def data_source(loop: Any) -> Any:
    """Return the source of the loaders of a loop."""
    return loop._data_source


@touches("_FitLoop._combined_loader", why="a loop makes its loaders again only where it has none")
def drop_loaders(loop: Any) -> bool:
    """Have a loop make its loaders again; returns whether it had any."""
    had, loop._combined_loader = loop._combined_loader is not None, None
    return had


@touches("_FitLoop._combined_loader", why="the loaders as the loop goes over them, with Lightning's samplers")
def loaders_in_use(loop: Any) -> list[Any]:
    """Return the loaders of a loop that has made them."""
    return list(loop._combined_loader.flattened)


@touches(
    "_FitLoop._combined_loader",
    "CombinedLoader._mode",
    why="whether a batch has a part of each of several loaders; the mode is not public",
)
def joins_batches(loop: Any) -> bool:
    """Return whether each batch of a loop is made of batches of several loaders."""
    combined = loop._combined_loader
    return len(combined.flattened) > 1 and combined._mode != "sequential"


@touches(
    "Trainer._accelerator_connector",
    why="whether Lightning divides the data; use_distributed_sampler is not kept",
)
def divides_data(trainer: Any) -> bool:
    """Return whether Lightning gives loaders a sampler with which each rank gets its share."""
    connector = trainer._accelerator_connector
    return bool(connector.use_distributed_sampler and connector.is_distributed)


@touches(
    "BatchSizeFinder._early_exit", why="Lightning's Tuner asks its finder in this way to leave out the run"
)
def search_only(finder: Any) -> None:
    """Have the run of a batch size finder end with its search."""
    finder._early_exit = True


@touches(
    "_IndexBatchSamplerWrapper._batch_sampler",
    why="a loader of predictions is divided below what counts indices",
)
def asked_sampler(batches: Any) -> Any:
    """Return the batch sampler that Lightning's for predictions asks; any other one itself."""
    return batches._batch_sampler if type(batches) is _IndexBatchSamplerWrapper else batches


@touches("LightningModule._on_before_batch_transfer", why="the hooks of a batch on its way to the device")
def before_batch_transfer(module: Any, batch: Any) -> Any:
    """Return the batch as the module's hooks hand it on before it goes to the device."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


@touches(
    "_AutomaticOptimization._make_closure",
    "_AutomaticOptimization._make_step_fn",
    "_AutomaticOptimization._make_backward_fn",
    "_AutomaticOptimization._make_zero_grad_fn",
    why="the closure of a batch, whose parts are run again where it does not fit",
)
def make_closures_by(trainer: Any, make: Callable[..., Any]) -> Callable[[], None]:
    """Have the fit loop take its closures from ``make(kwargs, make_step, backward, zero_grad)``."""
    # Backward and zero_grad may be None. Returns what undoes it.
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        backward, zero_grad = loop._make_backward_fn(optimizer), loop._make_zero_grad_fn(batch_idx, optimizer)
        return make(kwargs, loop._make_step_fn, backward, zero_grad)

    vars(loop)["_make_closure"] = make_closure
    return lambda: vars(loop).pop("_make_closure", None)


_WHY_ACCUMULATES = (
    "whether a batch ends with an optimizer step, which the loop decides, or a step that runs apart"
)


@touches("_FitLoop._should_accumulate", why=_WHY_ACCUMULATES)
def accumulates(trainer: Any) -> bool:
    """Return whether the batch under way only adds to the gradients."""
    return bool(trainer.fit_loop._should_accumulate())


@touches("_FitLoop._should_accumulate", why=_WHY_ACCUMULATES)
def accumulating(accumulates: bool) -> dict[str, Any]:
    """Return the attributes by which a fit loop accumulates a batch or not, whatever it has counted."""
    return {"_should_accumulate": lambda: accumulates}


@touches("LightningModule._current_fx_name", why="self.log needs to know in which hook it is called")
@contextmanager
def logs_as(module: Any, hook: str) -> Iterator[None]:
    """Let ``module.log`` take what the body logs as logged in that hook."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


@touches("_ResultMetric._forward_cache", why="what a logged metric gave for the last batch alone")
def batch_value(metric: Any, *value: Any) -> Any:
    """Return what a metric gave for the last batch; with a value, set it."""
    if value:
        (metric._forward_cache,) = value
    return metric._forward_cache


# -- loaders --

_WHY_WRAPS = (
    "a step is more than the module's step, and logged values are read between two hooks of an epoch's end"
)


@touches("_EvaluationLoop._evaluation_step", "_PredictionLoop._predict_step", why=_WHY_WRAPS)
@touches("_EvaluationLoop._store_dataloader_outputs", "_LoggerConnector.on_epoch_end", why=_WHY_WRAPS)
@contextmanager
def around_evaluation(
    trainer: Any,
    loop: Any,
    step: Callable[[Callable[[], None], int, int], None],
    before_reading: Callable[[bool], Any],
) -> Iterator[None]:
    """Let ``step(make, batch_idx, dataloader_idx)`` make each step, and be told before logged values are read."""
    # `before_reading` gets False at the end of a loader, True at the end of all.
    connector, predicts = trainer._logger_connector, hasattr(loop, "_predict_step")
    make_step = loop._predict_step if predicts else loop._evaluation_step
    end_loader: Any = getattr(loop, "_store_dataloader_outputs", None)
    end_all = connector.on_epoch_end
    name = "_predict_step" if predicts else "_evaluation_step"
    vars(loop)[name] = lambda *args: step(partial(make_step, *args), args[1], args[2])
    if not predicts:
        vars(loop)["_store_dataloader_outputs"] = lambda: before_reading(False) or end_loader()
        vars(connector)["on_epoch_end"] = lambda: before_reading(True) or end_all()
    try:
        yield
    finally:
        for owner, place in ((loop, name), (loop, "_store_dataloader_outputs"), (connector, "on_epoch_end")):
            vars(owner).pop(place, None)


@touches("_PredictionLoop._predictions", why="a batch that does not count gives no prediction")
def predictions_and_indices(loop: Any, dataloader_idx: int) -> list[list[Any]]:
    """Return the lists to which a loop adds a prediction and its indices; none of one that does not predict."""
    if not hasattr(loop, "_predictions"):
        return []
    return [loop._predictions[dataloader_idx], loop.epoch_batch_indices[dataloader_idx]]


# -- stopping, callbacks --


@touches(
    "Trainer._logger_connector",
    "_LoggerConnector.should_update_logs",
    "_TrainingEpochLoop._batches_that_stepped",
    why="whether Lightning gives the values of the current batch to its loggers",
)
def logs_this_step(trainer: Any) -> bool:
    """Return whether the values of the current training batch are logged; every 50th where nothing is."""
    if trainer.log_every_n_steps == 0:
        return bool((trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % 50 == 0)
    return bool(trainer._logger_connector.should_update_logs)


@touches(
    "_TrainingEpochLoop._results",
    "_ResultCollection.metrics",
    why="values for the progress bar are made numbers at every step, which waits for the device",
)
def read_progress_values_when(trainer: Any, is_due: Callable[[], bool]) -> Callable[[], None]:
    """Have the values of the progress bar read from the device only where due, and when an epoch ends."""
    # Returns what undoes it.
    results: Any = trainer.fit_loop.epoch_loop._results
    read_all = results.metrics

    def metrics(on_step: bool) -> Any:
        if not on_step or is_due():
            return read_all(on_step)
        shown = [value.meta for value in results.values() if value.meta.prog_bar]
        try:
            for meta in shown:
                meta.prog_bar = False
            return read_all(on_step)
        finally:
            for meta in shown:
                meta.prog_bar = True

    vars(results)["metrics"] = metrics
    return lambda: vars(results).pop("metrics", None)


@touches(
    "_TrainingEpochLoop._results",
    "_ResultCollection.reset",
    "_ResultMetric.cumulated_batch_size",
    why="a reset makes a new tensor of a count that values logged at steps alone do not need",
)
def keep_counts_of_step_values(trainer: Any) -> Callable[[], None]:
    """Have a reset of logged values leave alone what is logged at training steps only and has no mean."""
    # The new epoch's first step would otherwise have another tensor, and torch-xla would compile the
    # step anew. Returns what undoes it.
    results: Any = trainer.fit_loop.epoch_loop._results
    reset_all = results.reset

    def reset(metrics: bool | None = None, fx: str | None = None) -> None:
        kept = [
            (each, each.value, each.cumulated_batch_size)
            for each in results.values()
            if each.is_tensor and each.meta.is_mean_reduction and not each.meta.on_epoch
        ]
        reset_all(metrics, fx)
        for each, value, count in kept:
            each.value, each.cumulated_batch_size = value, count

    vars(results)["reset"] = reset
    return lambda: vars(results).pop("reset", None)


@touches(
    "Trainer._results", why="padded samples have no weight in the mean over the batches of what is logged"
)
def weigh_logged_values(trainer: Any, samples: int) -> None:
    """Let what the current batch logs without a ``batch_size`` have the weight of so many samples."""
    results: Any = trainer._results
    if results is not None:
        results.batch_size = samples


@touches(
    "_TrainingEpochLoop._results",
    "_ResultMetric._forward_cache",
    why="callback_metrics goes through everything that was logged, which costs more than a check of one metric",
)
def logged_in_this_step(trainer: Any, name: str) -> Tensor | None:
    """Return what ``callback_metrics`` would for a tensor that ``training_step`` logs at every step."""
    results: Any = trainer.fit_loop.epoch_loop._results
    result = results.get(f"training_step.{name}")
    if result is None or result.has_reset or not result.meta.on_step or not results.training:
        return None
    value = result._forward_cache
    return value.detach() if isinstance(value, Tensor) else None


@touches(
    "Trainer._accelerator_connector",
    why="what Lightning took for the cluster environment, also under a strategy that has none",
)
def cluster_environment_of(trainer: Any) -> Any:
    """Return the cluster environment of a Trainer."""
    return trainer._accelerator_connector.cluster_environment


@touches("Trainer._checkpoint_connector", why="where Lightning looks for a checkpoint after a requeue")
def path_after_requeue(trainer: Any) -> str:
    """Return where to save a checkpoint from which Lightning resumes once Slurm has requeued the job."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


@touches(
    "_CheckpointConnector._user_managed",
    "_CheckpointConnector._ckpt_path",
    why="after a requeue Lightning evaluates with the checkpoint of the requeue, whatever was trained since",
)
@contextmanager
def weights_as_they_are(trainer: Any) -> Iterator[None]:
    """Have ``validate`` and ``test`` without a ``ckpt_path`` take the weights that the model has."""
    # Under Slurm Lightning loads the newest ``hpc_ckpt_<n>.ckpt`` of the run's folder instead.
    connector = trainer._checkpoint_connector
    connector._user_managed, connector._ckpt_path = True, None
    try:
        yield
    finally:
        connector._user_managed = False


def part_of_action(action: str) -> Literal["data loading", "callbacks"] | None:
    """Return what an action belongs to, by its name in profilers' reports (documented nowhere else)."""
    if action.startswith("[Callback]"):  # such as "[Callback]ModelCheckpoint{...}.on_train_batch_end"
        return "callbacks"
    return "data loading" if action.endswith(".train_dataloader_next") else None


# -- What callbacks that take the place of Lightning's have in common --


class DropInConfigurationError(ConfigurationError, MisconfigurationException):
    """Bad arguments, which a program written for Lightning's class catches as ``MisconfigurationException``."""


@contextmanager
def faults_as_lightnings() -> Iterator[None]:
    """Raise a ``ConfigurationError`` of the body as one that Lightning's programs catch as well."""
    try:
        yield
    except ConfigurationError as error:
        raise DropInConfigurationError(error.faults) from None
