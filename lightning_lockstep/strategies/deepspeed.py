"""DeepSpeed's ZeRO that keeps all ranks in step, on CUDA and on CPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_lockstep._console import say
from lightning_lockstep._doors.deepspeed_internals import destroy
from lightning_lockstep._exports import public
from lightning_lockstep._lightning import (
    DDPStrategy,
    MisconfigurationException,
    Precision,
)
from lightning_lockstep._settings import settings_of
from lightning_lockstep.deepspeed.activation_checkpointing import configure_activation_checkpointing
from lightning_lockstep.deepspeed.agreement import agreed
from lightning_lockstep.deepspeed.builds.loading import prepared_where_loaded
from lightning_lockstep.deepspeed.builds.preparation import prepare_ops
from lightning_lockstep.deepspeed.configuration.given import device_type_given
from lightning_lockstep.deepspeed.configuration.named_options import with_named_options
from lightning_lockstep.deepspeed.configuration.ops import needed_ops
from lightning_lockstep.deepspeed.configuration.reading import read_config
from lightning_lockstep.deepspeed.configuration.run_config import RunConfig
from lightning_lockstep.deepspeed.engine import (
    adopt_process_group,
    divided_as_made,
    evaluation_config,
    make_engine,
)
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.deepspeed.precision import resolve_deepspeed_precision
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.mpi.backend import MPIBackendOptions
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.mpirun.command import MPIRunSettings
from lightning_lockstep.strategies.deepspeed_checkpoints import DeepSpeedCheckpoints
from lightning_lockstep.strategies.deepspeed_steps import DeepSpeedSteps
from lightning_lockstep.strategies.hooks import LifecycleHooks
from lightning_lockstep.strategies.lifecycle import RankLifecycle, RankStartup
from lightning_lockstep.strategies.mpi import MPIStartup
from lightning_lockstep.strategies.options import DeepSpeedSettings, reject_unknown

__all__ = ["LockstepDeepSpeedStrategy"]

# Options of Lightning's DeepSpeedStrategy that are not about DeepSpeed.
_OF_LIGHTNING = ("accelerator", "parallel_devices", "precision_plugin")
_MPI_BACKENDS = ("mpi4py", "mpi")


class LockstepDeepSpeedStrategy(LifecycleHooks, DeepSpeedSteps, DeepSpeedCheckpoints):
    """DeepSpeed on CUDA or CPU, one process a device, on one or several nodes, ZeRO stages 0 to 3.

    What it adds to Lightning's: it runs on CPUs too, over gloo or MPI, so that a configuration can be tried without
    a GPU; what DeepSpeed would silently ignore, and what contradicts the Trainer, is refused before any rank starts;
    ``auto`` in a configuration is filled in from the Trainer; one plain checkpoint file in the end; and everything of
    :class:`LockstepDDPStrategy`: failure propagation, the guard, placement table, CPU threads, uneven inputs.

    Args:
        config: DeepSpeed's own configuration, as a dictionary or the path of a JSON file.
            https://www.deepspeed.ai/docs/config-json/
        stage: Stage of ZeRO, 0 to 3; by default that of the configuration, or 2 without one.
        offload_optimizer: Where the optimizer's state is kept: ``none``, ``cpu`` or ``nvme``; by default as in the
            configuration.
        offload_param: Where the parameters are kept, in stage 3: ``none``, ``cpu`` or ``nvme``; by default as in the
            configuration.
        nvme_path: Folder on the NVMe disk for what is kept there.
        consolidate: Whether the best and the last checkpoint are also written as one plain file each, when the fit
            ends.
        adapt: Whether what DeepSpeed cannot do on this device is replaced by what it can, each replacement printed;
            otherwise it is refused.
        remove_stale_locks: Whether locks may be removed that a killed build of DeepSpeed's operations has left behind.
        exclude_frozen_parameters: Whether checkpoints leave out parameters without gradients.
        start_method: As for :class:`LockstepDDPStrategy`; so are the following.
        grace_period: Time from learning of a failure until a rank is ended by force [s].
        silence_limit: How long a rank may be stopped, or its host unreachable [s].
        uneven_inputs: What happens when ranks have different numbers of training batches.
        threads_per_rank: CPU threads per rank.
        bind_cores: Whether each rank is pinned to its own cores.
        timeout: Longest wait for another rank in a collective [s].
        guard: ``off``, ``watch`` or ``verify``.
        stall_timeout: How long a collective may take before the ranks compare where they are [s].
        guard_history: How many of the last collectives of each rank an error of the guard lists.
        process_group_backend: ``gloo``, ``nccl`` or ``mpi4py``; by default that of the device.
        cluster_environment: Tells which rank this process is; by default the one among the Trainer's plugins, or else
            found by environment variables.
        options: Lightning's ``accelerator``, ``parallel_devices`` and ``precision_plugin``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: DeepSpeed is not installed, or cannot be imported.

    Ranks: construct it alike in every process. At start-up all ranks connect once.
    """

    strategy_name = "lockstep_deepspeed"

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        stage: int | None = None,
        offload_optimizer: Literal["none", "cpu", "nvme"] | None = None,
        offload_param: Literal["none", "cpu", "nvme"] | None = None,
        nvme_path: str | Path | None = None,
        consolidate: bool = False,
        adapt: bool = False,
        remove_stale_locks: bool = False,
        exclude_frozen_parameters: bool = False,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        grace_period: float = 10.0,
        silence_limit: float = 120.0,
        uneven_inputs: Literal["error", "truncate", "join"] = "error",
        threads_per_rank: int | Literal["auto"] = "auto",
        bind_cores: bool = False,
        timeout: float | timedelta = 1800.0,
        guard: Literal["off", "watch", "verify"] = "watch",
        stall_timeout: float = 60.0,
        guard_history: int = 0,
        process_group_backend: str | None = None,
        cluster_environment: Any | None = None,
        **options: Any,
    ) -> None:
        self.settings = settings_of(DeepSpeedSettings, locals())
        reject_unknown(options, type(self), accepted=_OF_LIGHTNING)
        given = with_named_options(
            read_config(config),
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            nvme_path=nvme_path,
        )
        self._run_config = RunConfig(given, adapt=adapt, say=self._say)
        import_deepspeed(device_type_given())
        self.lifecycle = RankLifecycle(
            self, self.settings, startup=self.make_startup(), precision=self._resolve_precision
        )
        super().__init__(
            config=dict(self._run_config.given),
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=self.settings.duration,
            exclude_frozen_parameters=exclude_frozen_parameters,
            **options,
        )
        self.detect_unless_given(cluster_environment)
        self._let_go: Callable[[], None] = lambda: None  # of what DeepSpeed knows this rank by

    def make_startup(self) -> RankStartup:
        """Return how the ranks are started and connected: over MPI where that is the backend."""
        backend = self.settings.process_group_backend
        if backend in _MPI_BACKENDS:
            return MPIStartup(backend, MPIBackendOptions(), MPIRunSettings())
        return RankStartup(self.settings.start_method, backend)

    # -- before the ranks start ------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # Everything is checked while the Trainer is under construction, before any rank.
        device_type = self.root_device.type
        import_deepspeed(device_type)
        self._run_config.check_trainer(self.parallel_devices or (), device_type)
        self.config = dict(self._run_config.given)
        super()._configure_launcher()

    def _say(self, line: str) -> None:
        if self.cluster_environment.global_rank() == 0:
            say(f"lightning-lockstep: {line}")

    def _resolve_precision(self, plugin: Precision, requested: str | None, device_type: str) -> Precision:
        return resolve_deepspeed_precision(self._run_config.given, plugin, requested, device_type)

    # -- on each rank ----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Connect the ranks, on any device; Lightning's own refuses all but CUDA.

        Ranks: all, together.
        """
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Make the process group, open the side channel, show which rank runs where, and hand the group to DeepSpeed.

        Ranks: all, together.
        """
        super().setup_distributed()
        self._add_consolidation()
        self._let_go = adopt_process_group(
            rank=self.global_rank,
            local_rank=self.local_rank,
            world_size=self.world_size,
            address=self.cluster_environment.main_address,
            port=self.cluster_environment.main_port,
            timeout=self.settings.duration,
        )
        fits = self.lightning_module is None or self._fits
        self._prepare_ops(needed_ops(self._run_config.given, self.root_device.type, fits=fits))

    def _prepare_ops(self, names: Sequence[str]) -> None:
        prepare_ops(
            names,
            current_communicator(),
            remove_stale_locks=self.settings.remove_stale_locks,
            timeout=self.settings.duration.total_seconds(),
        )

    def _add_consolidation(self) -> None:
        module, callback = self.lightning_module, public("ConsolidateCheckpoints")
        if module is None or not self.settings.consolidate:
            return
        callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(one, callback) for one in callbacks):
            callbacks.append(callback())

    def _init_config_if_needed(self) -> None:
        # For every run again: its loaders, and so its batch sizes, may be others.
        if self.lightning_module is None:
            return
        if self._fits:
            with prepared_where_loaded(self._prepare_ops):  # the module may be asked for its optimizer
                self.config = self._run_config.of_fit(
                    self.lightning_module.trainer, precision=self._precision_name, world_size=self.world_size
                )
        else:
            self.config = self._run_config.of_evaluation(self._precision_name)

    @property
    def _precision_name(self) -> str:
        return str(self.precision_plugin.precision)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Divide parameters among the ranks as they are made, in stage 3.

        Only what that needs is looked at here: the module has no layers yet, so it cannot be asked for an optimizer.

        Ranks: all, together.
        """
        with divided_as_made(self._run_config.of_evaluation(self._precision_name)):
            yield

    def _init_optimizers(self) -> Any:
        try:
            with prepared_where_loaded(self._prepare_ops):
                return super()._init_optimizers()
        except MisconfigurationException as error:
            if "single optimizer" not in str(error):
                raise
        raise ConfigurationError(
            f"configure_optimizers of {type(self.lightning_module).__name__} returns several optimizers or schedulers:"
            " expected one optimizer and at most one scheduler, as DeepSpeed's engine has one of each. Give one"
            " optimizer groups of parameters with options of their own, or use strategy='lockstep_ddp'."
        )

    def _setup_model_and_optimizer(
        self, model: Any, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        if optimizer is not None:
            kind = type(optimizer)
            self.config = agreed(
                current_communicator(),
                lambda: self._run_config.adapted(self._complete_config, self.root_device.type, kind),
            )
        return make_engine(
            model,
            self._complete_config,
            device_index=self.root_device.index or 0,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
        )

    def _set_deepspeed_activation_checkpointing(self) -> None:
        configure_activation_checkpointing(self._complete_config)

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        self.model, _ = make_engine(
            model,
            evaluation_config(self._complete_config),
            device_index=self.root_device.index or 0,
            trains=False,
        )

    def teardown(self) -> None:
        """Release what the run used; the ranks stay connected for a next call of the Trainer.

        Ranks: every rank; waits for none.
        """
        engine: Any = self.model
        super().teardown()
        self._let_go()
        destroy(engine)  # or its hooks would run beside those of the next engine
