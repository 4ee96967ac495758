"""One process over all XLA devices of its host: batches divided among them, metrics as on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_lockstep._lightning import CheckpointIO, Precision, SingleDeviceStrategy, extract_batch_size
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep._trainer import asks_for_training_loader, given_to_trainer
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.global_order import in_global_order
from lightning_lockstep.loaders.loader_position import LoaderPosition
from lightning_lockstep.loaders.weights import StepWeights
from lightning_lockstep.numerics.precision import requested_precision
from lightning_lockstep.strategies.counted_steps import LockstepStrategy
from lightning_lockstep.strategies.xla_steps import XLASteps
from lightning_lockstep.xla.replicas import DeviceMesh
from lightning_lockstep.xla.runtime import XLARuntime


class LockstepXLASPMDStrategy(XLASteps, LockstepStrategy, SingleDeviceStrategy):
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
        self._mesh: DeviceMesh | None = None
        self._divided: dict[str, int] = {}
        self.weights = StepWeights()
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    def _configure_launcher(self) -> None:
        # The Trainer is under construction, so an error here ends the program before any work.
        self.use_xla_accelerator()
        if self.num_nodes > 1:
            raise ConfigurationError(
                f"num_nodes={self.num_nodes} with strategy='lockstep_xla_spmd': expected 1, one process over the"
                " devices of one host. Use strategy='lockstep_xla' on several hosts."
            )
        if given_to_trainer("devices") not in (None, "auto"):  # for these Lightning chooses a number
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
        """Give a shuffled training loader the order that it would have on several ranks."""
        module, processed = self.lightning_module, super().process_dataloader(dataloader)
        if module is None or not asks_for_training_loader(module.trainer):
            return processed
        # The seed is that of the sampler which Lightning makes for several ranks.
        return in_global_order(processed, module.trainer.accumulate_grad_batches)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step, and find the weight of its loss. Ranks: every process."""
        output = super().training_step(*args, **kwargs)
        module = self.lightning_module
        if module is not None and module.automatic_optimization:
            several = module.trainer.accumulate_grad_batches > 1
            samples = extract_batch_size([*args, *kwargs.values()][0]) if several else None
            self.weights.of_step(module.trainer, output, samples, current_communicator(), is_padding=False)
        return output

    def teardown(self) -> None:
        """Bring the module back to the CPU. Ranks: every process; waits for none."""
        self.weights.clear()
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
        return moved if self._mesh is None else self._mesh.divide_batch(moved)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what the optimizers have kept. Ranks: every process."""
        super().load_optimizer_state_dict(checkpoint)
        if self._mesh is not None and self.lightning_module is not None:
            for optimizer in self.optimizers:
                self._mesh.divide_states(self.lightning_module, optimizer, self._divided)
