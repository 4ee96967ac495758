"""One process over all XLA devices of its host: batches divided among them, metrics as on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_lockstep._console import say
from lightning_lockstep._lightning import Precision, SingleDeviceStrategy, XLAAccelerator, move_data_to_device
from lightning_lockstep._lightning.internals import show_accelerator
from lightning_lockstep._settings import Faults
from lightning_lockstep.numerics.precision import requested_precision
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.xla.accelerator import XLADevices
from lightning_lockstep.xla.mesh import DeviceMesh
from lightning_lockstep.xla.precision import resolve_xla_precision
from lightning_lockstep.xla.runtime import XLARuntime, check_torch_xla

__all__ = ["LockstepXLASPMDStrategy"]


class LockstepXLASPMDStrategy(SingleDeviceStrategy):
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

    Ranks: one process a host, each alike. The Trainer's ``devices`` is the number of devices; where there is no TPU,
        that many virtual ones on the CPU.
    """

    strategy_name = "lockstep_xla_spmd"
    _needed_for = f"strategy={strategy_name!r}"

    def __init__(
        self,
        *,
        parameters: Literal["data", "fsdp"] = "data",
        min_size: int = 100_000,
        patterns: Sequence[str] = (),
        downcast_bf16: bool = False,
        checkpoint_io: Any | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        faults = Faults()
        faults.choice("parameters", parameters, ("data", "fsdp"))
        faults.whole("min_size", min_size, what="a number of values", such_as=100_000)
        faults.flag("downcast_bf16", downcast_bf16)
        faults.raise_all()
        self._downcast_bf16 = downcast_bf16
        self._divides, self._min_size, self._patterns = parameters == "fsdp", min_size, tuple(patterns)
        self.parallel_devices: list[torch.device] | None = None
        self._runtime: XLARuntime | None = None
        self._mesh: DeviceMesh | None = None
        self._divided: dict[str, int] = {}
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    @property
    def root_device(self) -> torch.device:
        """The device that stands for all of them; before a run, the CPU."""
        return self._root_device

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a training step."""
        return Capabilities(whole_gradients=False, sees_out_of_memory=False)

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which a fault stops it before any work.
        check_torch_xla(self._needed_for)
        devices = XLADevices()
        if isinstance(self.accelerator, XLAAccelerator):
            show_accelerator(devices)
        else:
            self.accelerator = devices
        self.precision_plugin = resolve_xla_precision(
            self.precision_plugin, requested_precision(), downcast_bf16=self._downcast_bf16
        )

    def setup_environment(self) -> None:
        """Find torch-xla and its devices. Ranks: every process, alike."""
        if self._runtime is None:
            devices = len(self.parallel_devices or ())
            self._runtime = XLARuntime(self._needed_for, num_devices=devices or None)
            self._runtime.use_spmd()
            self._mesh = DeviceMesh(self._runtime)
            say(
                f"lightning-lockstep: one process over {self._mesh.size} XLA device(s)"
                f" ({self._runtime.device_type}); each batch is divided among them."
            )
        self._root_device = self._runtime.device()
        super().setup_environment()

    def model_to_device(self) -> None:
        """Move the module to the devices, and divide its parameters. Ranks: every process, alike."""
        super().model_to_device()
        if self._divides and self._mesh is not None and self.lightning_module is not None:
            self._divided = self._mesh.divide_parameters(
                self.lightning_module, min_size=self._min_size, patterns=self._patterns
            )

    def setup(self, trainer: Any) -> None:
        """Set the run up. Ranks: every process, alike."""
        # Tensors of torch.inference_mode cannot be lazy ones; loops without it evaluate under torch.no_grad.
        evaluating = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
        for loop in (*evaluating, trainer.predict_loop):
            loop.inference_mode = False
        super().setup(trainer)
        self.sync()

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the devices, divided among them. Ranks: every process, alike."""
        moved = super().batch_to_device(batch, device, dataloader_idx)
        return moved if self._mesh is None else self._mesh.divide_batch(moved)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what the optimizers have kept. Ranks: every process, alike."""
        super().load_optimizer_state_dict(checkpoint)
        if self._mesh is not None and self.lightning_module is not None:
            for optimizer in self.optimizers:
                self._mesh.divide_states(self.lightning_module, optimizer, self._divided)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint as a plain file, which loads without torch-xla. Ranks: every process, alike."""
        self.sync()
        super().save_checkpoint(
            move_data_to_device(checkpoint, torch.device("cpu")), filepath, storage_options
        )

    def sync(self) -> None:
        """Compile what is pending, if it is new, and begin to run it. Ranks: every process, alike."""
        if self._runtime is not None:
            self._runtime.sync()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Run what a batch without an optimizer step has left, so that each batch is a graph of its own."""
        self.sync()
        super().on_train_batch_start(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take an optimizer step, and run it. Ranks: every process, alike."""
        result = super().optimizer_step(*args, **kwargs)
        self.sync()
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step. Ranks: every process, alike."""
        return self._synced(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step. Ranks: every process, alike."""
        return self._synced(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's prediction step. Ranks: every process, alike."""
        return self._synced(super().predict_step(*args, **kwargs))

    def _synced(self, result: Any) -> Any:
        self.sync()
        return result

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the package registers its strategies when it is imported."""
