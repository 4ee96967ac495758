"""One process for each XLA device: gradients averaged between devices, all else as under DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import Unpack

from lightning_lockstep._lightning import (
    Precision,
    TrainerFn,
    XLAAccelerator,
    _AcceleratorConnector,
    find_shared_parameters,
    move_data_to_device,
    set_shared_parameters,
)
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep._trainer import calls_under_way, given_to_trainer
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.gather_uneven import gather_uneven
from lightning_lockstep.distributed.guard.verify import verify_parameters
from lightning_lockstep.distributed.process_group import broadcast_tensors
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.strategies.lifecycle import RankLifecycle
from lightning_lockstep.strategies.options import LifecycleSettings, OptionsOfXLA, settings_and_options
from lightning_lockstep.strategies.startup import RankStartup
from lightning_lockstep.xla.replicas import Replicas, check_replicas
from lightning_lockstep.xla.runtime import XLARuntime, check_accelerator, check_torch_xla, check_untouched
from lightning_lockstep.xla.steps import XLADevices, begin_lazy_run, own_memory, resolve_xla_precision

_OPERATIONS: dict[str, Any] = {"sum": "sum", "mean": "mean", "avg": "mean", "min": "min", "max": "max"}


def _gather_tensor(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensor of every rank, in rank order; sizes may differ: torchmetrics' ``dist_sync_fn``."""
    return [one.to(tensor.device) for one in gather_uneven(tensor.detach().cpu(), group=group)]


class _XLALauncher(ScriptLauncher):
    """Starts the other ranks of this host only if this process has not taken the devices that they need."""

    def _check_can_spawn_children(self) -> None:
        super()._check_can_spawn_children()
        if self.num_processes > 1:
            check_untouched()


class XLAStartup(RankStartup):
    """How the ranks are started and connected: by this program, over gloo between hosts, whatever the devices."""

    script_launcher = _XLALauncher

    def connect(self, strategy: Any, timeout: timedelta) -> bool:
        """See :meth:`RankStartup.connect`; one rank alone needs no group."""
        return strategy.world_size > 1 and super().connect(strategy, timeout)


class LockstepXLAStrategy(RankLifecycle):
    """Training on TPUs with one process per device, or on one XLA device of the CPU.

    Gradients are averaged between the devices, within the compiled step. Objects, logged values, metrics and barriers
    travel between hosts over gloo, where the guard sees who does not arrive. Failure propagation, the placement table,
    CPU threads and uneven inputs are those of :class:`LockstepDDPStrategy`.

    Args:
        downcast_bf16: With precision ``bf16-true``: whether float64 becomes float32 rather than bfloat16.
        options: As for :class:`LockstepDDPStrategy`: ``grace_period``, ``silence_limit``, ``uneven_inputs``,
            ``iterable_datasets``, ``threads_per_rank``, and for what travels between hosts ``timeout``, ``guard`` and
            ``stall_timeout``; ``cluster_environment``; and Lightning's ``checkpoint_io``, ``precision_plugin``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.
        MissingExtraError: torch-xla is not installed.

    Ranks: construct it in every process with the same arguments. On the CPU one only; several virtual devices
        are for :class:`LockstepXLASPMDStrategy`.
    """

    # torch-xla records operations and computes nothing until :meth:`sync`. All operations between two calls of
    # :meth:`sync`, which are those of one batch, are compiled as one graph, once for each set of shapes.

    strategy_name = "lockstep_xla"
    is_distributed = True  # so Lightning divides loaders among the ranks
    runtime: XLARuntime | None = None
    _device = torch.device("cpu")
    # Ends what a run has begun outside its steps; more than once does no harm.
    end_lazy_run: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *, downcast_bf16: bool = False, **options: Unpack[OptionsOfXLA]) -> None:
        self.downcast_bf16 = downcast_bf16
        self.settings, handed_on = settings_and_options(LifecycleSettings, OptionsOfXLA, locals())
        faults = Faults()
        faults.flag("downcast_bf16", downcast_bf16)
        for name in ("random_numbers", "batch_norm"):
            given = getattr(self.settings, name)
            faults.check(given == "of_rank", name, given, "'of_rank', because a step is compiled for XLA")
        faults.raise_all()
        self.num_nodes = 1
        self._replicas: Replicas | None = None
        self._metrics = ExitStack()  # changed for a run
        super().__init__(XLAStartup("popen", "gloo"), **handed_on)

    @property
    def root_device(self) -> torch.device:
        """The device of this process; before a run, the CPU."""
        return self._device

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a step, whose operations run later; among several replicas none can make it alone."""
        return Capabilities(sees_out_of_memory=False, runs_at_once=False, step_alone=self._replicas is None)

    def device_seed(self) -> int:
        """Return the state of the devices' random numbers; nothing is read from a device."""
        return 0 if self.runtime is None else self.runtime.seed()

    def set_device_seed(self, seed: int) -> None:
        """Let the devices' random numbers go on from a state, as a step that is run again does."""
        if self.runtime is not None:
            self.runtime.set_seed(seed)

    # -- while the Trainer is under construction: an error here ends the program before any rank starts --

    def _configure_launcher(self) -> None:
        check_torch_xla(f"strategy={self.strategy_name!r}")
        check_accelerator(isinstance(self.accelerator, XLAAccelerator))
        devices = XLADevices()
        if isinstance(self.accelerator, XLAAccelerator):
            # Lightning's connector accepts its accelerator for TPU only with its own two strategies for it.
            for variables in calls_under_way(_AcceleratorConnector.__init__):
                variables["self"].accelerator = devices
        else:
            self.accelerator = devices
        check_replicas(self.num_nodes * self.num_processes)
        if given_to_trainer("sync_batchnorm"):
            raise ConfigurationError(
                f"sync_batchnorm=True with strategy={self.strategy_name!r}: expected False, because torch-xla has no"
                " such layer. Under strategy='lockstep_xla_spmd' batch normalisation sees whole batches."
            )
        super()._configure_launcher()

    def resolve_precision(self, plugin: Precision, requested: str | None, device_type: str) -> Precision:
        """Return the precision plugin to use; see :func:`resolve_xla_precision`."""
        return resolve_xla_precision(plugin, requested, downcast_bf16=self.downcast_bf16)

    # -- start and end --

    def setup_environment(self) -> None:
        """Connect the ranks, then find torch-xla and its device. Ranks: all, together."""
        self._device = torch.device("xla", 0)
        super().setup_environment()
        self.setup_distributed()  # first, so that a rank whose device fails can tell the others
        self.runtime = self.runtime or self._make_runtime()
        self._device = self.runtime.device()
        if self.world_size > 1:
            self._replicas = Replicas(self.runtime, current_communicator())

    def _make_runtime(self) -> XLARuntime:
        runtime = XLARuntime(num_devices=1)
        runtime.be_process(self.local_rank, self.num_processes)
        return runtime

    def model_to_device(self) -> None:
        """Move the module to the device, with the values of rank 0. Ranks: all, together; a broadcast a tensor."""
        module = self._module
        if self._replicas is not None:
            verify_parameters(module, current_communicator().gather, buffers=True)
            broadcast_tensors([*module.parameters(), *module.buffers()])
        # A parameter cannot move to an XLA device in place: a new one replaces it, at each place where it is tied.
        tied = find_shared_parameters(module)
        module.to(self.root_device)
        set_shared_parameters(module, tied)

    def setup(self, trainer: Any) -> None:
        """Set the run up. Ranks: all, together."""
        if self._replicas is not None:
            # By itself torchmetrics would gather tensors of the device over gloo, which carries those of the CPU.
            for one in self._module.modules():
                if isinstance(one, Metric) and one.dist_sync_fn is None:
                    self._metrics.enter_context(replaced(one, dist_sync_fn=_gather_tensor))
        # torch-xla's tensors cannot be made in torch.inference_mode; without it loops evaluate in torch.no_grad.
        evaluating = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
        for loop in (*evaluating, trainer.predict_loop):
            loop.inference_mode = False
        is_fit = trainer.state.fn == TrainerFn.FITTING
        assert self.runtime is not None
        if is_fit:
            self.runtime.check_backward()
        super().setup(trainer)
        self.runtime.seed_devices()
        self.sync()
        self.end_lazy_run = begin_lazy_run(trainer)
        if is_fit and self.is_global_zero:
            say("lightning-lockstep: torch-xla compiles in the first two steps, which may take minutes.")

    def teardown(self) -> None:
        """Bring the module back to the CPU. Ranks: every rank; waits for none."""
        self.end_lazy_run()
        self._metrics.close()
        if self.failed:  # what is pending on the device may wait for a rank that has exited
            self.teardown_in_place()
            return
        module = self.lightning_module
        tied = [] if module is None else find_shared_parameters(module)
        super().teardown()
        if module is not None:
            set_shared_parameters(module, tied)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank 0 as a plain file, which loads without torch-xla. Ranks: all, together."""
        self.sync()
        if self.is_global_zero:
            on_cpu = move_data_to_device(checkpoint, torch.device("cpu"))
            super().save_checkpoint(on_cpu, filepath, storage_options)

    # -- steps --

    def sync(self) -> None:
        """Compile what is pending, if it is new, and begin to run it. Ranks: every rank; waits for none."""
        if self.runtime is not None:
            self.runtime.sync()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Run what a batch without an optimizer step has left, so that each batch is a separate graph."""
        self.sync()
        super().on_train_batch_start(batch, batch_idx)

    def prepare_gradients(self) -> None:
        """Make the gradients ready to be clipped, averaged over all ranks. Ranks: all, together."""
        own_memory(self._module)
        if self._replicas is not None:
            self.check_failure()
            self._replicas.average_gradients(self._module)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Prepare the gradients if the module steps its optimizers itself, which it may do at any time."""
        super().post_backward(closure_loss)
        if not self._module.automatic_optimization:
            self.prepare_gradients()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take an optimizer step, and run it. Ranks: all, together."""

        def with_gradients() -> Any:
            result = closure()
            if self._module.automatic_optimization:
                self.prepare_gradients()
            return result

        result = super().optimizer_step(optimizer, with_gradients, model, **kwargs)
        self.sync()
        return result

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with super()._evaluating():
            yield
        self.sync()

    # -- between ranks --

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank; after a failure, return at once. Ranks: all, together; between hosts."""
        if not self.failed:
            current_communicator().barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src`` on every rank, tensors exactly. Ranks: all, together; between hosts."""
        # Torch pickles a tensor of an XLA device as one of the CPU, and moves it to the device when it is read.
        return obj if self._replicas is None else current_communicator().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over all ranks. Ranks: all, together; one all-reduce between hosts."""
        operation = _OPERATIONS.get(str(getattr(reduce_op, "name", reduce_op)).lower())
        if operation is None:
            raise ConfigurationError(f"reduce_op={reduce_op!r}: expected one of {', '.join(_OPERATIONS)}.")
        if self._replicas is None or not isinstance(tensor, Tensor):
            return tensor
        value = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        # 16 bits, booleans and means of whole numbers are reduced in a dtype that holds the result.
        of_16_bits = value.is_floating_point() and value.itemsize < 4
        if of_16_bits or (operation == "mean" and not value.is_floating_point()):
            value = value.float()
        elif value.dtype is torch.bool:
            value = value.int()
        reduced = current_communicator().all_reduce(value, "sum" if operation == "mean" else operation)
        if operation == "mean":
            reduced /= self.world_size
        return reduced.to(tensor.device, tensor.dtype if of_16_bits else None)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, say yes. Ranks: all, together; one all-reduce between hosts."""
        votes = torch.tensor(int(decision))
        return bool(current_communicator().all_reduce(votes, "min" if all else "max"))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, of shape (ranks, ...). Ranks: all; between hosts if it is on the CPU."""
        if self._replicas is None:
            return tensor.unsqueeze(0)
        if tensor.device.type == "cpu":
            return torch.stack(_gather_tensor(tensor))
        return self._replicas.gather(tensor if sync_grads else tensor.detach())
