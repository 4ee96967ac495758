"""DeepSpeed's ZeRO that keeps all ranks in step, on CUDA and on CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_lockstep._lightning import (
    DDPStrategy,
    DeepSpeedStrategy,
    LightningModule,
    Precision,
    TrainerFn,
)
from lightning_lockstep._text import say
from lightning_lockstep._trainer import weights_only_of_run
from lightning_lockstep.deepspeed.checkpoints.files import is_deepspeed_checkpoint
from lightning_lockstep.deepspeed.checkpoints.resuming import (
    Load,
    load_plain_weights,
    open_folder,
    saving_as,
    whole_checkpoint,
    without_trained_parts,
)
from lightning_lockstep.deepspeed.config_parsing import read_config, with_named_options
from lightning_lockstep.deepspeed.config_per_run import RunConfig, device_type_given
from lightning_lockstep.deepspeed.engine import (
    adopt_process_group,
    divided_as_made,
    evaluation_config,
    make_engine,
    resolve_deepspeed_precision,
)
from lightning_lockstep.deepspeed.engine_adapters import EngineAdapter, gradients_of
from lightning_lockstep.deepspeed.engine_trials import EngineTrials, without_engine
from lightning_lockstep.deepspeed.importing import import_deepspeed, load_ops, needed_builders
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.checkpoint_folder import saved_at, whole_folder
from lightning_lockstep.distributed.plain_data import load_without_objects
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.strategies.lifecycle import RankLifecycle
from lightning_lockstep.strategies.options import DeepSpeedSettings, OptionsOfRanks, settings_and_options
from lightning_lockstep.strategies.startup import startup_over


class LockstepDeepSpeedStrategy(RankLifecycle, DeepSpeedStrategy):
    """DeepSpeed on CUDA or CPU, one process per device, on one or several nodes, ZeRO stages 0 to 3.

    In addition to Lightning's ``DeepSpeedStrategy``: it runs on CPUs too, over gloo or MPI, so that a
    configuration can be tried without a GPU; settings that DeepSpeed would silently ignore, or that contradict
    the Trainer, are refused before any rank starts; ``auto`` in a configuration is filled in from the Trainer;
    checkpoints can be written as one plain file; and everything of :class:`LockstepDDPStrategy`: failure
    propagation, the guard, placement table, CPU threads, uneven inputs.

    Args:
        config: DeepSpeed's own configuration, as a dictionary or the path of a JSON file.
            https://www.deepspeed.ai/docs/config-json/
        stage: Stage of ZeRO, 0 to 3; by default that of the configuration, or 2 without one.
        offload_optimizer: Where the optimizer's state is kept: ``none``, ``cpu`` or ``nvme``; by default as configured.
        offload_param: Where parameters are kept, in stage 3: ``none``, ``cpu`` or ``nvme``; by default as configured.
        nvme_path: Folder on the NVMe disk for what is kept there.
        adapt: Whether settings that DeepSpeed does not support on this device are replaced by supported ones,
            each replacement printed; otherwise they are refused.
        exclude_frozen_parameters: Whether checkpoints leave out parameters without gradients.
        options: As for :class:`LockstepDDPStrategy`: ``start_method``, ``grace_period``, ``silence_limit``,
            ``uneven_inputs``, ``iterable_datasets``, ``random_numbers``, ``batch_norm``, ``threads_per_rank``,
            ``timeout``, ``guard``, ``stall_timeout``, ``process_group_backend`` (``mpi4py`` too),
            ``cluster_environment``; and Lightning's ``accelerator``, ``parallel_devices``, ``precision_plugin``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: DeepSpeed is not installed, or cannot be imported.

    Ranks: construct it in every process with the same arguments. At start-up all ranks connect once.
    """

    strategy_name = "lockstep_deepspeed"
    settings: DeepSpeedSettings
    _load_folder: Load | None = None  # loads what load_checkpoint opened, once hooks have seen it

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        stage: int | None = None,
        offload_optimizer: Literal["none", "cpu", "nvme"] | None = None,
        offload_param: Literal["none", "cpu", "nvme"] | None = None,
        nvme_path: str | Path | None = None,
        adapt: bool = False,
        exclude_frozen_parameters: bool = False,
        **options: Unpack[OptionsOfRanks],
    ) -> None:
        self.settings, handed_on = settings_and_options(DeepSpeedSettings, OptionsOfRanks, locals())
        import_deepspeed(device_type_given())  # because DeepSpeed parses the configuration
        given = with_named_options(
            read_config(config),
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            nvme_path=nvme_path,
        )
        self._run_config = RunConfig(given, adapt=adapt, say=self._say)
        super().__init__(
            startup_over(self.settings),
            config=dict(self._run_config.given),
            exclude_frozen_parameters=exclude_frozen_parameters,
            **handed_on,
        )
        self.weights.corrects = False  # gradients are in the engine
        self._let_go: Callable[[], None] = lambda: None  # undoes `adopt_process_group`

    # -- before the ranks start --

    def _configure_launcher(self) -> None:
        # Everything is checked while the Trainer is under construction, before any rank.
        device_type = self.device_type
        import_deepspeed(device_type)
        self._run_config.check_trainer(self.parallel_devices or (), device_type, self.world_size)
        self.config = dict(self._run_config.given)
        super()._configure_launcher()

    def _say(self, line: str) -> None:
        if self.cluster_environment.global_rank() == 0:
            say(f"lightning-lockstep: {line}")

    def resolve_precision(self, plugin: Precision, requested: str | None, device_type: str) -> Precision:
        """See :meth:`RankLifecycle.resolve_precision`."""
        return resolve_deepspeed_precision(self._run_config.given, plugin, requested, device_type)

    # -- on each rank --

    def setup_environment(self) -> None:
        """Connect the ranks, on any device; Lightning's own refuses all but CUDA. Ranks: all, together."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Connect the ranks, as under any strategy, and hand their group to DeepSpeed. Ranks: all, together."""
        super().setup_distributed()
        self._let_go = adopt_process_group(self.local_rank, self.settings.duration)
        if self.lightning_module is None or self._fits:
            load_ops(needed_builders(self._run_config.given), self.settings.duration.total_seconds())

    def _init_config_if_needed(self) -> None:
        # This is done again for each run, whose loaders, and so its batch sizes, may be different.
        if self.lightning_module is None:
            return
        if self._fits:
            self.config = self._run_config.of_fit(
                self.lightning_module.trainer, precision=self._precision_name, world_size=self.world_size
            )
        else:
            self.config = self._run_config.of_evaluation(self._precision_name)

    @property
    def _precision_name(self) -> str:
        return str(self.precision_plugin.precision)

    def model_sharded_context(self) -> AbstractContextManager[None]:  # type: ignore[override] # theirs is a generator
        """Divide parameters among the ranks as they are made, in stage 3. Ranks: all, together."""
        # This reads only the settings that it needs: the module has no layers yet, so it cannot make its optimizer.
        return divided_as_made(self._run_config.of_evaluation(self._precision_name))

    def _setup_model_and_optimizer(
        self, model: Any, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        return make_engine(
            model,
            self._complete_config,
            device_index=self.root_device.index or 0,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )

    def _set_deepspeed_activation_checkpointing(self) -> None:
        # This sets all options, because they are global variables of DeepSpeed. Lightning's own method leaves those
        # that another fit has set and this configuration does not name.
        import deepspeed

        deepspeed.checkpointing.configure(None, deepspeed_config=self._complete_config)

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        self.model, _ = make_engine(
            model,
            evaluation_config(self._complete_config),
            device_index=self.root_device.index or 0,
            trains=False,
        )

    def teardown(self) -> None:
        """Release what the run used; the ranks stay connected for a next call. Ranks: every rank; waits for none."""
        engine: Any = self.model
        super().teardown()
        self._let_go()
        if hasattr(engine, "destroy"):
            engine.destroy()  # or its hooks would run together with those of the next engine

    # -- training steps, and what other features can do with them --

    @property
    def needs_loss(self) -> str:
        """Why each rank's step must give a loss, in stage 2."""
        if self._complete_config["zero_optimization"]["stage"] != 2:
            return super().needs_loss
        return "DeepSpeed's stage 2 adds up gradients in the order in which the backward gives them"

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether the engine decides when the optimizer steps: no, Lightning's loop does, as under any strategy."""
        # Lightning counts from the start of each epoch and steps after its last batch, DeepSpeed goes on counting.
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Do nothing: the engine knows which batches are accumulated, and reduces what its stage needs."""
        yield

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a training step: DeepSpeed's engine runs it, on all ranks together."""
        return Capabilities(
            whole_gradients=False, step_alone=False, replays="together" if self.zero_stage_3 else "alone"
        )

    def engine_gradients(self) -> EngineAdapter:
        """Return what this rank holds of the gradients, once the engine is set up for a fit."""
        return gradients_of(self.model, getattr(self.precision_plugin, "history", None))

    @property
    def engine_trials(self) -> EngineTrials:
        """Steps of the engine on one rank alone, to see what memory they need."""
        return EngineTrials(self, self._run_config.given)

    def steps_apart(self, module: LightningModule) -> AbstractContextManager[None]:
        """Let the body run ``module`` by autograd alone, and leave the engine as it was."""
        # Stages 0 to 2 send nothing; in stage 3 all ranks do it together, because the parameters are gathered.
        return without_engine(self, module, module.trainer.model)

    # -- checkpoints: folders and plain files --

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint folder, in place of one of that name once the new one is whole."""
        target = self.broadcast(str(filepath))
        checkpoint = without_trained_parts(checkpoint, self._module)
        exclude, engine = self.exclude_frozen_parameters, self.deepspeed_engine
        local = bool(self._complete_config.get("checkpoint", {}).get("use_node_local_storage", False))
        with (
            whole_folder(self, target, current_communicator().gather, on_each_node=local) as draft,
            saving_as(engine, checkpoint, exclude_frozen=exclude) as to_save,
            warnings.catch_warnings(),
        ):
            # This warning says how to join the files of the weights; docs/deepspeed.md has a shorter way.
            warnings.filterwarnings("ignore", message="When saving the DeepSpeed Stage 3 checkpoint")
            super().save_checkpoint(to_save, draft, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint folder of DeepSpeed, or a plain Lightning checkpoint, which has whole weights."""
        checkpoint_path = saved_at(str(checkpoint_path), says=self.is_global_zero)
        weights_only, self._load_folder = weights_only_of_run(weights_only), None
        if not is_deepspeed_checkpoint(checkpoint_path):
            return load_without_objects(partial(DDPStrategy.load_checkpoint, self), checkpoint_path, weights_only)
        stage, communicator = self._complete_config["zero_optimization"]["stage"], current_communicator()
        if not self._fits:
            # DeepSpeed 0.19 itself cannot do this in stage 3, and in the others only on the same number of ranks.
            return whole_checkpoint(checkpoint_path, self._module, communicator, divided=stage == 3)
        found, self._load_folder = open_folder(
            self.model,
            self._module,
            Path(checkpoint_path),
            communicator,
            plain_only=weights_only is not False,
        )
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights into the engine's module; of a folder also the state of its optimizer. Ranks: all, together."""
        if self._load_folder is not None:
            load, self._load_folder = self._load_folder, None
            load(checkpoint["state_dict"], strict)
            return
        load_plain_weights(self.model, self._module, checkpoint["state_dict"], strict=strict)
        if self._fits and checkpoint.get("optimizer_states") and self.is_global_zero:
            say(
                "lightning-lockstep: this is a plain checkpoint: its weights are loaded, and the optimizer starts"
                " afresh. A checkpoint folder of DeepSpeed has the state of both."
            )

    @property
    def _complete_config(self) -> dict[str, Any]:
        assert self.config is not None
        return self.config

    @property
    def _fits(self) -> bool:
        return bool(self._module.trainer.state.fn == TrainerFn.FITTING)
