"""What a strategy for XLA devices does around each step; only there operations are compiled and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_lockstep._lightning import (
    Precision,
    Strategy,
    TrainerFn,
    XLAAccelerator,
    _AcceleratorConnector,
    find_shared_parameters,
    move_data_to_device,
    set_shared_parameters,
)
from lightning_lockstep._text import say
from lightning_lockstep._trainer import calls_under_way
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.xla.runtime import XLARuntime, check_accelerator, check_torch_xla
from lightning_lockstep.xla.steps import XLADevices, begin_lazy_run, own_memory, resolve_xla_precision


class XLASteps(Strategy):
    """Base of strategies for XLA devices; the second base is one of Lightning's strategies."""

    # torch-xla records operations and computes nothing until :meth:`sync`. All operations between two calls of
    # :meth:`sync`, which are those of one batch, are compiled as one graph, once for each set of shapes.

    strategy_name: str  # as the Trainer and Hydra know it
    downcast_bf16: bool = False  # with bf16-true: float64 becomes float32 rather than bfloat16
    runtime: XLARuntime | None = None
    _device = torch.device("cpu")
    # Ends what a run has begun outside its steps; more than once does no harm.
    end_lazy_run: Callable[[], None] = staticmethod(lambda: None)

    @property
    def needed_for(self) -> str:
        """What the user asked for, for errors."""
        return f"strategy={self.strategy_name!r}"

    @property
    def root_device(self) -> torch.device:
        """The device of this process; before a run, the CPU."""
        return self._device

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a training step, whose operations are called now and run later."""
        return Capabilities(sees_out_of_memory=False, runs_at_once=False)

    def device_seed(self) -> int:
        """Return the state of the devices' random numbers; nothing is read from a device."""
        return 0 if self.runtime is None else self.runtime.seed()

    def set_device_seed(self, seed: int) -> None:
        """Let the devices' random numbers go on from a state, as a step that is run again does."""
        if self.runtime is not None:
            self.runtime.set_seed(seed)

    # -- while the Trainer is under construction -------------------------------------------------------

    def use_xla_accelerator(self) -> None:
        """Check that torch-xla is installed, and give the Trainer an accelerator for its devices."""
        check_torch_xla(self.needed_for)
        check_accelerator(isinstance(self.accelerator, XLAAccelerator))
        devices = XLADevices()
        if isinstance(self.accelerator, XLAAccelerator):
            # Lightning's connector accepts its accelerator for TPU only with its own two strategies for it.
            for variables in calls_under_way(_AcceleratorConnector.__init__):
                variables["self"].accelerator = devices
        else:
            self.accelerator = devices

    def resolve_precision(
        self, plugin: Precision, requested: str | None, device_type: str = "xla"
    ) -> Precision:
        """Return the precision plugin to use; see :func:`resolve_xla_precision`."""
        return resolve_xla_precision(plugin, requested, downcast_bf16=self.downcast_bf16)

    # -- the run ----------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """Move the module to the device; tied parameters stay tied. Ranks: every process."""
        if self.model is not None:
            # A parameter cannot move to an XLA device in place: a new one replaces it, at each place where it is tied.
            tied = find_shared_parameters(self.model)
            self.model.to(self.root_device)
            set_shared_parameters(self.model, tied)

    def setup(self, trainer: Any) -> None:
        """Set the run up. Ranks: every process."""
        # torch-xla's tensors cannot be made in torch.inference_mode; without it loops evaluate in torch.no_grad.
        evaluating = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
        for loop in (*evaluating, trainer.predict_loop):
            loop.inference_mode = False
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit and self.runtime is not None:
            self.runtime.check_backward()
        super().setup(trainer)
        if self.runtime is not None:
            self.runtime.seed_devices()
        self.sync()
        self.end_lazy_run = begin_lazy_run(trainer)
        if is_fit and self.is_global_zero:
            say(
                "lightning-lockstep: torch-xla compiles the first two steps of a fit, which may take minutes."
            )

    def sync(self) -> None:
        """Compile what is pending, if it is new, and begin to run it. Ranks: every process."""
        if self.runtime is not None:
            self.runtime.sync()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Run what a batch without an optimizer step has left, so that each batch is a separate graph."""
        self.sync()
        super().on_train_batch_start(batch, batch_idx)

    def prepare_gradients(self) -> None:
        """Make the gradients of a backward ready to be clipped and used. Ranks: every process."""
        if self.lightning_module is not None:
            own_memory(self.lightning_module)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Prepare the gradients if the module steps its optimizers itself, which it may do at any time."""
        super().post_backward(closure_loss)
        if self.lightning_module is not None and not self.lightning_module.automatic_optimization:
            self.prepare_gradients()

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Take an optimizer step, and run it. Ranks: every process."""
        by_itself = self.lightning_module is not None and self.lightning_module.automatic_optimization

        def with_gradients() -> Any:
            result = closure()
            if by_itself:
                self.prepare_gradients()
            return result

        return self._synced(super().optimizer_step(optimizer, with_gradients, model, **kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation step. Ranks: every process."""
        return self._synced(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test step. Ranks: every process."""
        return self._synced(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's prediction step. Ranks: every process."""
        return self._synced(super().predict_step(*args, **kwargs))

    def _synced(self, result: Any) -> Any:
        self.sync()
        return result

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint as a plain file, which loads without torch-xla. Ranks: every process."""
        self.sync()
        on_cpu = move_data_to_device(checkpoint, torch.device("cpu"))
        super().save_checkpoint(on_cpu, filepath, storage_options)

    def teardown(self) -> None:
        """Bring the module back to the CPU. Ranks: every process; waits for none."""
        self.end_lazy_run()
        module = self.lightning_module
        tied = [] if module is None else find_shared_parameters(module)
        super().teardown()
        if module is not None:
            set_shared_parameters(module, tied)
