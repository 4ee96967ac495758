"""The strategies for torch-xla: a process for each device, and one process over a mesh of devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor
from torchmetrics import Metric

from lightning_lockstep._lightning import (
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    SingleDeviceStrategy,
    extract_batch_size,
)
from lightning_lockstep._settings import Faults, settings_of
from lightning_lockstep._text import say
from lightning_lockstep._trainer import asks_for_training_loader, given_to_trainer
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.gather_uneven import (
    broadcast_object,
    gather_tensor,
    reduce_tensor,
)
from lightning_lockstep.distributed.guard.verify import verify_parameters
from lightning_lockstep.distributed.process_group import broadcast_tensors
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher
from lightning_lockstep.loaders.global_order import in_global_order
from lightning_lockstep.loaders.weights import StepWeights
from lightning_lockstep.numerics.precision import requested_precision
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.stopping.loader_position import LoaderPosition
from lightning_lockstep.strategies.lifecycle import (
    LifecycleHooks,
    PlainCheckpoints,
    RankLifecycle,
    RankStartup,
    WeightedSteps,
)
from lightning_lockstep.strategies.options import LifecycleSettings
from lightning_lockstep.strategies.xla_steps import XLASteps
from lightning_lockstep.xla.replicas import DeviceMesh, Replicas, check_replicas
from lightning_lockstep.xla.runtime import XLARuntime, check_untouched

# -- One process for each XLA device: gradients averaged between devices, all else as under DDP --

_OPERATIONS: dict[str, Any] = {"sum": "sum", "mean": "mean", "avg": "mean", "min": "min", "max": "max"}


class _XLALauncher(ScriptLauncher):
    """Starts the other ranks of this host only where this process has not taken devices that were to be theirs."""

    def _check_can_spawn_children(self) -> None:
        super()._check_can_spawn_children()
        if self.num_processes > 1:
            check_untouched(self.num_processes)


class XLAStartup(RankStartup):
    """How the ranks are started and connected: by this program, over gloo between hosts, whatever the devices."""

    script_launcher = _XLALauncher

    def __init__(self) -> None:
        super().__init__("popen", "gloo")

    def connect(self, strategy: Any, timeout: timedelta) -> bool:
        """See :meth:`RankStartup.connect`; one rank alone needs no group."""
        return strategy.world_size > 1 and super().connect(strategy, timeout)

    def device_of_group(self, strategy: Any) -> torch.device:
        return torch.device("cpu")


class LockstepXLAStrategy(XLASteps, LifecycleHooks):
    """Training on TPUs with one process per device, or on one XLA device of the CPU.

    Gradients are averaged between the devices, within the compiled step. Objects, logged values, metrics and barriers
    travel between hosts over gloo, where the guard sees who does not arrive. Failure propagation, the placement table,
    CPU threads and uneven inputs are those of :class:`LockstepDDPStrategy`.

    Args:
        downcast_bf16: With precision ``bf16-true``: whether float64 becomes float32 rather than bfloat16.
        grace_period: As for :class:`LockstepDDPStrategy`, like all that follows: time from learning of a failure
            until a rank is ended by force [s].
        silence_limit: How long a rank may be stopped, or its host unreachable, before that counts as a failure [s].
        uneven_inputs: When ranks have different numbers of training batches: ``error``, ``truncate`` or ``join``.
        iterable_datasets: ``as_given``, or ``shard`` to divide an ``IterableDataset`` among ranks and workers.
        threads_per_rank: CPU threads per rank; ``auto`` is usable cores / ranks of the node.
        bind_cores: Whether each rank is pinned to its own cores.
        timeout: Longest wait for another rank between hosts [s].
        guard: ``off``, ``watch`` or ``verify``, for what travels between hosts.
        stall_timeout: How long that may take before the ranks compare where they are [s].
        cluster_environment: Tells which rank this process is; by default found by environment variables.
        checkpoint_io: As in Lightning.
        precision_plugin: As in Lightning.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: torch-xla is not installed.

    Ranks: construct it in every process with the same arguments. On the CPU one only; several virtual devices
        are for :class:`LockstepXLASPMDStrategy`.
    """

    strategy_name = "lockstep_xla"
    runs_alone = False  # torch-xla belongs to the devices that it has seen first

    def __init__(
        self,
        *,
        downcast_bf16: bool = False,
        grace_period: float = 10.0,
        silence_limit: float = 120.0,
        uneven_inputs: Literal["error", "truncate", "join"] = "error",
        iterable_datasets: Literal["as_given", "shard"] = "as_given",
        threads_per_rank: int | Literal["auto"] = "auto",
        bind_cores: bool = False,
        timeout: float | timedelta = 1800.0,
        guard: Literal["off", "watch", "verify"] = "watch",
        stall_timeout: float = 60.0,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        if not isinstance(downcast_bf16, bool):
            raise ConfigurationError(f"downcast_bf16={downcast_bf16!r}: expected True or False.")
        self.downcast_bf16 = downcast_bf16
        self.settings = settings_of(LifecycleSettings, locals())
        self.lifecycle = RankLifecycle(
            self, self.settings, startup=XLAStartup(), precision=self.resolve_precision
        )
        self.num_nodes = 1
        self._replicas: Replicas | None = None
        self._synced_metrics: list[Metric] = []
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.detect_unless_given(cluster_environment)

    # -- who there is -----------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of ranks per node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning divides loaders among the ranks."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """How Lightning divides loaders."""
        ranks = self.num_nodes * self.num_processes
        return self.lifecycle.sampler_kwargs({"num_replicas": ranks, "rank": self.global_rank})

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a training step; among several replicas none can make it alone."""
        return Capabilities(sees_out_of_memory=False, runs_at_once=False, step_alone=self._replicas is None)

    def set_world_ranks(self) -> None:
        """Give this rank's number to the cluster environment. Ranks: every rank, alone."""
        self.lifecycle.set_world_ranks()

    # -- start and end ----------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which an error stops it before any rank.
        self.use_xla_accelerator()
        count = self.num_nodes * self.num_processes
        check_replicas(count)
        if count > 1 and given_to_trainer("sync_batchnorm"):
            raise ConfigurationError(
                "sync_batchnorm=True with strategy='lockstep_xla': expected False, as torch-xla has no such layer."
                " Under strategy='lockstep_xla_spmd' batch normalisation sees whole batches."
            )
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Connect the ranks, then find torch-xla and its device. Ranks: all, together."""
        self._device = torch.device("xla", 0)
        super().setup_environment()
        self.setup_distributed()  # first, so that a rank whose device fails can say so
        if self.runtime is None:
            self.runtime = XLARuntime(self.needed_for, num_devices=1)
            self.runtime.be_process(self.local_rank, self.num_processes)
        self._device = self.runtime.device()
        if self.world_size > 1:
            self._replicas = self.make_replicas(self.runtime)

    def make_replicas(self, runtime: XLARuntime) -> Replicas:
        """Return the devices of all ranks. Ranks: all, together."""
        return Replicas(runtime, current_communicator())

    def model_to_device(self) -> None:
        """Move the module to the device, with the values of rank 0. Ranks: all, together; a broadcast a tensor."""
        if self._replicas is not None and self.lightning_module is not None:
            self._take_values_of_rank_0(self.lightning_module)
        super().model_to_device()

    def _take_values_of_rank_0(self, module: torch.nn.Module) -> None:
        verify_parameters(module, current_communicator().gather, buffers=True)
        broadcast_tensors([*module.parameters(), *module.buffers()])

    def setup(self, trainer: Any) -> None:
        """Set the run up. Ranks: all, together."""
        if self._replicas is not None and self.lightning_module is not None:
            # Left to itself, torchmetrics gives tensors of the device to the group of the hosts.
            found = [one for one in self.lightning_module.modules() if isinstance(one, Metric)]
            self._synced_metrics = [one for one in found if one.dist_sync_fn is None]
            for metric in self._synced_metrics:
                metric.dist_sync_fn = gather_tensor
        super().setup(trainer)

    def teardown(self) -> None:
        """Release what the run used. Ranks: every rank; waits for none."""
        self.end_lazy_run()
        for metric in self._synced_metrics:
            metric.dist_sync_fn = None
        self._synced_metrics = []
        if self.lifecycle.failed:  # what is pending on the device may wait for a rank that has exited
            self.lifecycle.teardown()
            return
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0, as a plain file. Ranks: all, together."""
        if self.is_global_zero:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            self.sync()

    # -- between ranks ----------------------------------------------------------------------------------

    def prepare_gradients(self) -> None:
        """Average the gradients over all ranks. Ranks: all, together; see :meth:`Replicas.average_gradients`."""
        super().prepare_gradients()
        if self._replicas is not None and self.lightning_module is not None:
            self.lifecycle.check()
            self._replicas.average_gradients(self.lightning_module)

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank; after a failure, return at once. Ranks: all, together; between hosts."""
        if not self.lifecycle.failed:
            current_communicator().barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank, tensors exactly. Ranks: all, together; between hosts."""
        if self._replicas is None:
            return obj
        return broadcast_object(current_communicator(), obj, src, self.root_device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all ranks; anything else as it is.

        Ranks: all, together; one all-reduce between hosts.
        """
        operation = _OPERATIONS.get(str(getattr(reduce_op, "name", reduce_op)).lower())
        if operation is None:
            raise ConfigurationError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPERATIONS)}.")
        if self._replicas is None or not isinstance(tensor, Tensor):
            return tensor
        return reduce_tensor(current_communicator(), tensor, operation)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, say yes. Ranks: all, together; one all-reduce between hosts."""
        votes = torch.tensor(int(decision))
        return bool(current_communicator().all_reduce(votes, "min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, of shape (ranks, ...).

        Ranks: all, together; between devices, or between hosts where the tensor is on the CPU.
        """
        if self._replicas is None:
            return tensor.unsqueeze(0)
        if tensor.device.type == "cpu":
            return torch.stack(gather_tensor(tensor))
        return self._replicas.gather(tensor, gradients=sync_grads and torch.is_grad_enabled())


# -- One process over all XLA devices of its host: batches divided among them, metrics as on one device --


class LockstepXLASPMDStrategy(XLASteps, WeightedSteps, PlainCheckpoints, SingleDeviceStrategy):
    """Training on a mesh of XLA devices, from one process (SPMD).

    The program sees one device and whole batches; torch-xla divides each batch among the devices and puts the
    reductions between them into the compiled step. So ``self.log``, metrics and checkpoints need nothing special.

    Args:
        parameters: ``data`` keeps whole parameters on each device, ``fsdp`` divides large ones among them.
        min_size: With ``fsdp``: number of values from which a parameter is divided.
        patterns: With ``fsdp``: names of parameters, with ``*`` and ``?``, that are divided whatever their size.
        downcast_bf16: With precision ``bf16-true``: whether float64 becomes float32 rather than bfloat16.
        checkpoint_io: As in Lightning.
        precision_plugin: As in Lightning.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: torch-xla is not installed.

    Ranks: one process on one host. The Trainer's ``devices`` is the number of devices, ``auto`` takes what there is;
        where there is no TPU, that many virtual ones on the CPU.
    """

    strategy_name = "lockstep_xla_spmd"

    def __init__(
        self,
        *,
        parameters: Literal["data", "fsdp"] = "data",
        min_size: int = 100_000,
        patterns: Sequence[str] = (),
        downcast_bf16: bool = False,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        faults = Faults()
        faults.choice("parameters", parameters, ("data", "fsdp"))
        faults.whole("min_size", min_size, what="a number of values", such_as=100_000)
        faults.flag("downcast_bf16", downcast_bf16)
        faults.raise_all()
        self.downcast_bf16 = downcast_bf16
        self._divides, self._min_size, self._patterns = parameters == "fsdp", min_size, tuple(patterns)
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self._num_devices: int | None = None
        self._said_ragged = False
        self._mesh: DeviceMesh | None = None
        self._divided: dict[str, int] = {}
        self._weights = StepWeights()
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which an error stops it before any work.
        self.use_xla_accelerator()
        if self.num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} with strategy='lockstep_xla_spmd': expected 1, one process over the"
                " devices of one host. Use strategy='lockstep_xla' on several hosts."
            )
        if given_to_trainer("devices") not in (None, "auto"):  # of which Lightning makes its own number
            self._num_devices = len(self.parallel_devices or ()) or None
        self.precision_plugin = self.resolve_precision(self.precision_plugin, requested_precision())

    def setup_environment(self) -> None:
        """Find torch-xla and its devices. Ranks: every process."""
        if self.runtime is None:
            runtime = XLARuntime(self.needed_for, num_devices=self._num_devices)
            runtime.use_spmd()
            self.runtime, self._mesh = runtime, DeviceMesh(runtime)
            say(
                f"lightning-lockstep: one process uses all XLA devices ({self._mesh.size} x"
                f" {self.runtime.device_type}); each batch is divided among them."
            )
        self._device = self.runtime.device()
        super().setup_environment()
        if self.lightning_module is not None:
            LoaderPosition.attach(self.lightning_module.trainer)

    def process_dataloader(self, dataloader: object) -> Any:
        """Let a shuffled training loader have the order that ranks would have."""
        module, processed = self.lightning_module, super().process_dataloader(dataloader)
        if module is None or not asks_for_training_loader(module.trainer):
            return processed
        # The seed is that of the sampler which Lightning makes for several ranks.
        return in_global_order(processed, int(os.environ.get("PL_GLOBAL_SEED", "0")))

    @property
    def weights(self) -> StepWeights:
        """See :attr:`WeightedSteps.weights`."""
        return self._weights

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, and find what its loss counts. Ranks: every process."""
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            several = module.trainer.accumulate_grad_batches > 1
            samples = extract_batch_size([*args, *kwargs.values()][0]) if several else None
            self._weights.of_step(module.trainer, output, samples, current_communicator(), is_padding=False)
        return output

    def teardown(self) -> None:
        """Bring the module back to the CPU. Ranks: every process; waits for none."""
        self._weights.clear()
        super().teardown()

    def model_to_device(self) -> None:
        """Move the module to the devices, and divide its parameters. Ranks: every process."""
        super().model_to_device()
        if self._divides and self._mesh is not None and self.lightning_module is not None:
            self._divided = self._mesh.divide_parameters(
                self.lightning_module, min_size=self._min_size, patterns=self._patterns
            )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the devices, divided among them. Ranks: every process."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._mesh is None:
            return moved
        self._say_ragged(batch, self._mesh.size)
        return self._mesh.divide_batch(moved)

    def _say_ragged(self, batch: Any, devices: int) -> None:
        """Say once that a batch cannot be divided evenly."""
        found: list[int] = []
        apply_to_collection(batch, torch.Tensor, lambda one: found.extend(one.shape[:1]))
        if found and found[0] % devices and not self._said_ragged:
            self._said_ragged = True
            say(
                f"lightning-lockstep: a batch of size {found[0]} is divided among {devices} devices, of which the last"
                " ones get fewer samples or none; no sample is added or dropped. Each new batch size is compiled once"
                " more: StaticShapes(last_batch='drop') leaves such a batch of training out, last_batch='pad' fills it"
                " up, evaluation_last_batch='pad' one of validation and test."
            )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what the optimizers have kept. Ranks: every process."""
        super().load_optimizer_state_dict(checkpoint)
        if self._mesh is not None and self.lightning_module is not None:
            for optimizer in self.optimizers:
                self._mesh.divide_states(self.lightning_module, optimizer, self._divided)
