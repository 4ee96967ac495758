"""Torch's ``fully_shard`` that keeps all ranks in step, on CPU and CUDA: a part of the model on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed
from typing_extensions import Unpack

from lightning_lockstep._lightning import (
    DDPStrategy,
    LightningModule,
    ModelParallelStrategy,
    Precision,
    TrainerFn,
)
from lightning_lockstep._text import counted
from lightning_lockstep._trainer import given_to_trainer, weights_only_of_run
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.checkpoint_folder import saved_at, whole_folder
from lightning_lockstep.distributed.guard.verify import verify_parameters
from lightning_lockstep.distributed.process_group import broadcast_tensors
from lightning_lockstep.distributed.sharded_state import (
    all_see_parts,
    gathered,
    load_optimizer,
    load_parts,
    load_weights,
    parameters_of,
    save_parts,
)
from lightning_lockstep.distributed.sharding import (
    divide,
    divided_parts,
    give_up_gathered,
    make_mesh,
    own_gradients,
    set_reductions,
    take_values,
)
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.capabilities import Capabilities, StepGradients
from lightning_lockstep.strategies.fsdp_units import (
    check_optimizers,
    check_trained,
    refuse_address,
    refuse_callbacks,
    roots_of,
    units_of,
)
from lightning_lockstep.strategies.lifecycle import RankLifecycle
from lightning_lockstep.strategies.options import FSDPSettings, OptionsOfRanks, settings_and_options
from lightning_lockstep.strategies.startup import startup_over

_COMPUTES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", *_COMPUTES)


class LockstepFSDPStrategy(RankLifecycle, DDPStrategy):
    """A model divided among the ranks by torch's ``fully_shard`` (FSDP2), one process per device, on CPU or CUDA.

    Each rank keeps a part of every parameter, of its gradient and of its optimizer state. Units of the
    model are gathered when they are needed; what is in no unit is gathered for the whole step. Any LightningModule
    can be trained as it is. Everything of :class:`LockstepDDPStrategy` applies here too: failure propagation, the
    guard, the placement table, resolved precision, CPU threads.

    Args:
        shard: Which modules are units: ``auto`` (blocks of one class that a ``ModuleList`` or ``Sequential`` repeats,
            each of 100,000 values or more), the name of a class, a list of such names, or a function that is given
            the name of a module and the module and says whether it is one.
        reshard_after_forward: Whether a unit frees its whole parameters after its forward and gathers them again for
            its backward (as ZeRO stage 3), or keeps them until then (as stage 2).
        offload: ``cpu`` keeps each rank's parts in the memory of its host and runs the optimizer there; on CPU ranks
            they are there anyway.
        mesh: Sizes of ``shard``, the ranks that divide a model among themselves, and of ``replicate``, the copies of
            it (HSDP); of the two, one that is missing follows from the number of ranks. By default all divide one.
        activation_checkpointing: Whether units compute their activations again in the backward, and keep none.
        reduce_dtype: In which gradients are reduced: ``float32``, or ``compute`` for the dtype of the computation.
        state_dict: Checkpoints as one plain file of whole tensors (``full``), or a folder in which each rank writes
            its part (``sharded``). Either is read, whatever this says.
        options: As for :class:`LockstepDDPStrategy`: ``start_method``, ``grace_period``, ``silence_limit``,
            ``uneven_inputs``, ``iterable_datasets``, ``random_numbers``, ``batch_norm``, ``threads_per_rank``,
            ``timeout``, ``guard``, ``stall_timeout``, ``process_group_backend`` (``mpi4py`` too),
            ``cluster_environment``; and Lightning's ``accelerator``, ``parallel_devices``, ``precision_plugin``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.

    Ranks: construct it in every process with the same arguments. In a step each unit is gathered once or twice and its
        gradients are reduced once: 1.5 times what DDP sends with ``reshard_after_forward``, as much without.
    """

    # This is no subclass of Lightning's ModelParallelStrategy, because the Trainer refuses 16-mixed and 64-true under
    # that, and all that it does about fully_shard (a module without configure_model, checkpoints) would be replaced.

    strategy_name = "lockstep_fsdp"
    settings: FSDPSettings

    def __init__(
        self,
        *,
        shard: str | Sequence[str] | Callable[[str, Any], bool] = "auto",
        reshard_after_forward: bool = True,
        offload: Literal["none", "cpu"] = "none",
        mesh: Mapping[str, int] | None = None,
        activation_checkpointing: bool = False,
        reduce_dtype: Literal["float32", "compute"] = "float32",
        state_dict: Literal["full", "sharded"] = "full",
        **options: Unpack[OptionsOfRanks],
    ) -> None:
        self.settings, handed_on = settings_and_options(FSDPSettings, OptionsOfRanks, locals())
        super().__init__(startup_over(self.settings), **handed_on)

    # -- before the ranks start --

    def resolve_precision(self, plugin: Precision, requested: str | None, device_type: str) -> Precision:
        """See :meth:`RankLifecycle.resolve_precision`."""
        name = requested or str(plugin.precision)
        if name not in _PRECISIONS:
            raise ConfigurationError(f"precision={name!r}: expected one of {', '.join(_PRECISIONS)}.")
        return super().resolve_precision(plugin, requested, device_type)

    def _configure_launcher(self) -> None:
        # The Trainer is under construction, so an error here ends the program before any rank starts.
        if self.device_type == "cuda":
            if self.settings.offload == "cpu":  # norms of gradients are then on the host
                self.startup.backend = self.startup.backend or "cpu:gloo,cuda:nccl"
            backend = self.startup.backend or ""
            if "gloo" in backend and "nccl" not in backend:
                raise ConfigurationError(
                    f"process_group_backend={backend!r} on GPUs: expected 'nccl' (the default), because gathering"
                    " whole weights of a GPU over gloo ends with a segmentation fault."
                )
        super()._configure_launcher()
        self._mesh_sizes()
        given = given_to_trainer("callbacks") or ()
        refuse_callbacks(given if isinstance(given, Sequence) else [given], parts=self._saves_parts)

    @property
    def launcher(self) -> Any:
        """What starts the ranks. With a module that cannot be divided this raises, so that none is started."""
        if self.lightning_module is not None:
            units_of(self.lightning_module, self.settings.shard)
        return self._launcher

    def _mesh_sizes(self) -> tuple[int, int]:
        ranks, given = self.num_nodes * self.num_processes, self.settings.mesh or {}
        replicate = given.get("replicate", max(1, ranks // given.get("shard", ranks)))
        shard = given.get("shard", ranks // replicate)
        if shard * replicate != ranks:
            raise ConfigurationError(
                f"mesh={dict(given)!r} with {counted(ranks, 'rank')}: expected sizes whose product is the number of"
                " ranks."
            )
        return shard, replicate

    # -- on each rank --

    def setup_distributed(self) -> None:
        """Connect the ranks and make their mesh. Ranks: all, together."""
        super().setup_distributed()
        shard, replicate = self._mesh_sizes()
        self._mesh = make_mesh(self.root_device.type, shard=shard, replicate=replicate)
        self._module._device_mesh = self._mesh  # what its configure_model reads as `self.device_mesh`

    # ``configure_model`` makes a module in the memory of the host: no device has to hold it whole.
    tensor_init_context = ModelParallelStrategy.tensor_init_context

    def setup(self, trainer: Any) -> None:
        """Divide the module unless that has been done, and make its optimizers. Ranks: all, together."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        refuse_callbacks(trainer.callbacks, parts=self._saves_parts)
        module, precision = self._module, str(self.precision_plugin.precision)
        verify_parameters(module, current_communicator().gather, buffers=True)
        if divided_parts(module):  # by its own configure_model, or for an earlier run
            if (before := vars(module).get("_divided_for", precision)) != precision:
                raise ConfigurationError(
                    f"precision={precision!r}, but an earlier run divided this module for precision={before!r}, and it"
                    " stays so: expected the same precision, or a new module."
                )
            take_values(module, self.root_device)
        else:
            if self._layer_sync is not None:
                self._layer_sync.apply(module)
            self.precision_plugin.convert_module(module)
            self._divide(module, precision)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # torch cannot train parameters that it first gathered in it
        self.draw_apart(trainer)

    def _divide(self, module: LightningModule, precision: str) -> None:
        settings, compute = self.settings, _COMPUTES.get(precision)
        callbacks: Any = module.trainer.callbacks  # type: ignore[attr-defined]
        units, full = units_of(module, settings.shard, callbacks=callbacks, halves=compute is not None)
        if settings.activation_checkpointing:
            for unit in units:
                unit.forward = partial(recomputed, unit.forward, use_reentrant=False)
        widens = settings.reduce_dtype == "float32" and precision not in ("32-true", "64-true")
        roots = roots_of(module)
        divide(
            roots,
            [unit for unit in units if unit not in roots],
            full,
            mesh=self._mesh,
            device=self.root_device,
            reshard=settings.reshard_after_forward,
            offload=settings.offload == "cpu" and self.root_device.type != "cpu",
            compute=compute,
            reduce=torch.float32 if widens else None,
        )
        vars(module)["_divided_for"] = precision  # which cannot change afterwards

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, of this rank's parts of the parameters. Ranks: each, alone."""
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)
        own = set(self._module.parameters())
        if any(parameter not in own for one in self.optimizers for parameter in parameters_of(one)):
            raise ConfigurationError(
                f"configure_optimizers of {type(self._module).__name__} gives an optimizer tensors that are not"
                " parameters of the module, perhaps those from before it was divided: expected what self.parameters()"
                " returns in configure_optimizers."
            )

    def teardown(self) -> None:
        """Release what the run used; the module stays divided, on its device. Ranks: every rank; waits for none."""
        self.teardown_in_place()

    # -- steps --

    def on_train_start(self) -> None:
        """Raise if hooks at the start have added something that would not be trained as in one process."""
        give_up_gathered(self._module)  # a hook may have called the module
        check_trained(self._module)
        super().on_train_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step. Ranks: all, together."""
        if not self._module.automatic_optimization:
            # What was called while another optimizer was toggled still has weights gathered that need no gradient.
            give_up_gathered(self._module)
        return super().training_step(*args, **kwargs)

    needs_loss = "the ranks gather and reduce the parts of the model together in the backward"

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make an optimizer's step. Ranks: each, alone, but for what the closure does."""
        output = super().optimizer_step(*args, **kwargs)
        # A part that was called but had no backward (frozen, or without gradients) still has its old weights gathered.
        give_up_gathered(self._module)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backwards in the body reduce nothing: each rank keeps whole gradients until a later one reduces them."""
        set_reductions(self._module, False)
        try:
            yield
        finally:
            set_reductions(self._module, True)

    def on_validation_start(self) -> None:
        """Give all ranks the buffers of rank 0, as a checkpoint does. Ranks: all, together; a broadcast a buffer."""
        broadcast_tensors(self._module.buffers())

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        """Free what was gathered for the steps. Ranks: each, alone."""
        give_up_gathered(self._module)

    on_test_end = on_predict_end = on_validation_end

    # All ranks make each step together, because each has only a part of the model.
    step_capabilities = Capabilities(whole_gradients=False, step_alone=False, replays="together")

    def engine_gradients(self) -> DividedGradients:
        """Return what this rank holds of the gradients, once the module is divided."""
        return DividedGradients(self._module, self.precision_plugin)

    # -- checkpoints --

    restore_checkpoint_after_setup = True  # once the module is divided, so that each rank takes its part

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: whole ones on rank 0 for a plain file. Ranks: all, together."""
        return self._as_saved(self._module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer: whole on rank 0 for a plain file. Ranks: all, together."""
        return self._as_saved(super().optimizer_state(optimizer))

    def _as_saved(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._saves_parts else gathered(state, keep=self.is_global_zero)

    @property
    def _saves_parts(self) -> bool:
        return self.settings.state_dict == "sharded"

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a file on rank 0, or a folder on all ranks that is there once it is whole. Ranks: all, together."""
        if not self._saves_parts:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        target = self.broadcast(str(filepath)).removeprefix("file://")
        refuse_address(target)
        with whole_folder(self, target, current_communicator().gather) as draft:
            save_parts(checkpoint, Path(draft), is_main=self.is_global_zero)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a plain checkpoint, or this rank's parts of a folder. Ranks: all, together."""
        path = saved_at(str(checkpoint_path).removeprefix("file://"), says=self.is_global_zero)
        weights_only = weights_only_of_run(weights_only)
        if not all_see_parts(path, current_communicator().gather):
            return super().load_checkpoint(path, weights_only)
        return load_parts(Path(path), self._module, self.optimizers, weights_only=weights_only is not False)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, whole or divided. Ranks: each, alone."""
        load_weights(self._module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, whole or divided. Ranks: each, alone."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_optimizer(optimizer, state)


class DividedGradients(StepGradients):
    """Gradients of which each rank has a part."""

    divided = True

    def gradients(self, optimizer: Any = None) -> list[Tensor]:
        """Return this rank's parts, and whole gradients that wait for a reduction."""
        return own_gradients(self._module)
