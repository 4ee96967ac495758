"""One process over all XLA devices of its host: batches divided among them, metrics as on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from lightning_utilities import apply_to_collection

from lightning_lockstep._console import say
from lightning_lockstep._lightning import Precision, SingleDeviceStrategy
from lightning_lockstep._lightning.internals import given_to_trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.precision import requested_precision
from lightning_lockstep.strategies.xla_steps import XLASteps
from lightning_lockstep.xla.mesh import DeviceMesh
from lightning_lockstep.xla.runtime import XLARuntime

__all__ = ["LockstepXLASPMDStrategy"]


class LockstepXLASPMDStrategy(XLASteps, SingleDeviceStrategy):
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
        checkpoint_io: Any | None = None,
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
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which a fault stops it before any work.
        self.use_xla_accelerator()
        if self.num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} with strategy='lockstep_xla_spmd': expected 1, one process over the"
                " devices of one host. Use strategy='lockstep_xla' on several hosts."
            )
        if given_to_trainer("devices") not in (None, "auto"):  # of which Lightning makes a number of its own
            self._num_devices = len(self.parallel_devices or ()) or None
        self.precision_plugin = self.resolve_precision(self.precision_plugin, requested_precision())

    def setup_environment(self) -> None:
        """Find torch-xla and its devices. Ranks: every process, alike."""
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

    def model_to_device(self) -> None:
        """Move the module to the devices, and divide its parameters. Ranks: every process, alike."""
        super().model_to_device()
        if self._divides and self._mesh is not None and self.lightning_module is not None:
            self._divided = self._mesh.divide_parameters(
                self.lightning_module, min_size=self._min_size, patterns=self._patterns
            )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the devices, divided among them. Ranks: every process, alike."""
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
        """Load what the optimizers have kept. Ranks: every process, alike."""
        super().load_optimizer_state_dict(checkpoint)
        if self._mesh is not None and self.lightning_module is not None:
            for optimizer in self.optimizers:
                self._mesh.divide_states(self.lightning_module, optimizer, self._divided)
