"""One process over all XLA devices of its host: batches divided among them, metrics as on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_lockstep._lightning import CheckpointIO, Precision
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep._trainer import given_to_trainer
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.strategies.xla import LockstepXLAStrategy
from lightning_lockstep.xla.replicas import DeviceMesh
from lightning_lockstep.xla.runtime import XLARuntime


class LockstepXLASPMDStrategy(LockstepXLAStrategy):
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
        without a TPU it is the number of virtual ones on the CPU.
    """

    strategy_name = "lockstep_xla_spmd"
    num_processes = 1  # whatever the number of devices

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
        self._divides, self._min_size, self._patterns = parameters == "fsdp", min_size, tuple(patterns)
        self._num_devices: int | None = None
        self._divided: dict[str, int] = {}
        super().__init__(downcast_bf16=downcast_bf16, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    def _configure_launcher(self) -> None:
        if self.num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} with strategy='lockstep_xla_spmd': expected 1, one process over the"
                " devices of one host. Use strategy='lockstep_xla' on several hosts."
            )
        if given_to_trainer("devices") not in (None, "auto"):  # for these Lightning chooses a number
            self._num_devices = len(self.parallel_devices or ()) or None
        super()._configure_launcher()
        self._launcher = None  # Lightning refuses one that starts ranks in a notebook

    def _make_runtime(self) -> XLARuntime:
        runtime = XLARuntime(num_devices=self._num_devices)
        runtime.use_spmd()
        self._mesh = DeviceMesh(runtime)
        say(
            f"lightning-lockstep: one process uses all XLA devices ({self._mesh.size} x {runtime.device_type}); each"
            " batch is divided among them."
        )
        return runtime

    def _counts_samples(self, trainer: Any) -> bool:
        return bool(trainer.accumulate_grad_batches > 1)  # also those of streams

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor, as on one device."""
        return tensor

    def model_to_device(self) -> None:
        """Move the module to the devices, and divide its parameters. Ranks: every process."""
        super().model_to_device()
        if self._divides:
            self._divided = self._mesh.divide_parameters(self._module, min_size=self._min_size, patterns=self._patterns)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the devices, divided among them. Ranks: every process."""
        return self._mesh.divide_batch(super().batch_to_device(batch, device, dataloader_idx))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what the optimizers have kept. Ranks: every process."""
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            self._mesh.divide_states(self._module, optimizer, self._divided)
