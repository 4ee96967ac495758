"""Torch's ``fully_shard`` that keeps all ranks in step, on CPU and CUDA: a part of the model on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed
from typing_extensions import Unpack

from lightning_lockstep._doors.lightning import (
    ClusterEnvironment,
    DDPStrategy,
    LightningModule,
    Precision,
    TrainerFn,
)
from lightning_lockstep._doors.lightning_internals import give_device_mesh
from lightning_lockstep._settings import settings_of
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.mpi.backend import MPIBackendOptions
from lightning_lockstep.distributed.sharded_state import gathered, load_optimizer, load_weights
from lightning_lockstep.distributed.sharding import (
    Division,
    check_same_model,
    divide,
    divided_parts,
    gather_around_steps,
    make_mesh,
    set_reductions,
)
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.mpirun_command import MPIRunSettings
from lightning_lockstep.numerics.precision import resolve_precision
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.strategies.lifecycle import LifecycleHooks, RankLifecycle, RankStartup
from lightning_lockstep.strategies.mpi import MPIStartup
from lightning_lockstep.strategies.options import FSDPSettings, OptionsOfLightning, reject_unknown

#: Number of values from which ``shard="auto"`` takes a repeated block for a unit; less is not worth a message.
LEAST_UNIT = 100_000

_COMPUTES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_PRECISIONS = ("64-true", "32-true", "16-true", "bf16-true", *_COMPUTES)


class LockstepFSDPStrategy(LifecycleHooks, DDPStrategy):
    """A model divided among the ranks by torch's ``fully_shard`` (FSDP2), one process a device, on CPU or CUDA.

    Each rank keeps a part of every parameter, of its gradient and of what the optimizer keeps for it. Units of the
    model are gathered when they are needed; what is in no unit is gathered for the whole step. Any LightningModule
    can be trained as it is. Everything of :class:`LockstepDDPStrategy` holds here too: failure propagation, the guard,
    the placement table, resolved precision, CPU threads.

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

    Ranks: construct it alike in every process. In a step each unit is gathered once or twice and its gradients are
        reduced once: 1.5 times what DDP sends with ``reshard_after_forward``, as much without.
    """

    # Not on Lightning's ModelParallelStrategy: its Trainer refuses 16-mixed and 64-true under that, and all in it that
    # is about fully_shard (a module without configure_model, checkpoints) would be replaced.

    strategy_name = "lockstep_fsdp"

    def __init__(
        self,
        *,
        shard: str | Sequence[str] | Callable[[str, torch.nn.Module], bool] = "auto",
        reshard_after_forward: bool = True,
        offload: Literal["none", "cpu"] = "none",
        mesh: Mapping[str, int] | None = None,
        activation_checkpointing: bool = False,
        reduce_dtype: Literal["float32", "compute"] = "float32",
        state_dict: Literal["full", "sharded"] = "full",
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
        cluster_environment: ClusterEnvironment | None = None,
        **options: Unpack[OptionsOfLightning],
    ) -> None:
        reject_unknown(options, type(self), OptionsOfLightning.__optional_keys__)
        self.settings = settings_of(FSDPSettings, locals())
        self.lifecycle = RankLifecycle(
            self, self.settings, startup=self.make_startup(), precision=_resolve_precision
        )
        super().__init__(
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            timeout=self.settings.duration,
            start_method=start_method,
            **options,
        )
        self.detect_unless_given(cluster_environment)
        self._mesh: Any = None

    def make_startup(self) -> RankStartup:
        """Return how the ranks are started and connected: over MPI where that is the backend."""
        backend = self.settings.process_group_backend
        if backend == "mpi4py":
            return MPIStartup(backend, MPIBackendOptions(), MPIRunSettings())
        return RankStartup(self.settings.start_method, backend)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # -- before the ranks start ------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()

    # -- on each rank ----------------------------------------------------------------------------------

    def setup_distributed(self) -> None:
        """Connect the ranks and make their mesh. Ranks: all, together."""
        super().setup_distributed()
        shard, replicate = self._mesh_sizes()
        self._mesh = make_mesh(self.root_device.type, shard=shard, replicate=replicate)
        give_device_mesh(self._module, self._mesh)

    def _mesh_sizes(self) -> tuple[int, int]:
        ranks, given = self.num_nodes * self.num_processes, self.settings.mesh or {}
        shard = given.get("shard", ranks // given.get("replicate", 1))
        replicate = given.get("replicate", ranks // shard if shard else 0)
        if shard * replicate != ranks:
            raise ConfigurationError(
                f"mesh={dict(given)!r} with {ranks} ranks: expected sizes whose product is the number of ranks."
            )
        return shard, replicate

    def setup(self, trainer: Any) -> None:
        """Divide the module unless that has been done, and make its optimizers. Ranks: all, together."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, fits = self._module, trainer.state.fn == TrainerFn.FITTING
        if not divided_parts(module):
            if fits and self._layer_sync:
                self._layer_sync.apply(module)
                self._layer_sync = None
            self.precision_plugin.convert_module(module)
            check_same_model(module, current_communicator())
            self._divide(module)
            gather_around_steps(module)
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _divide(self, module: LightningModule) -> None:
        precision = str(self.precision_plugin.precision)
        compute = _COMPUTES.get(precision)
        widen = self.settings.reduce_dtype == "float32" and precision not in ("32-true", "64-true")
        units = _units(module, self.settings.shard)
        if self.settings.activation_checkpointing:
            for unit in units:
                unit.forward = partial(recomputed, unit.forward, use_reentrant=False)
        roots = [module] if module.automatic_optimization else list(_roots(module))
        divide(
            roots,
            [unit for unit in units if unit not in roots],
            [],
            Division(
                mesh=self._mesh,
                device=self.root_device,
                reshard=self.settings.reshard_after_forward,
                offload=self.settings.offload == "cpu" and self.root_device.type != "cpu",
                compute=compute,
                reduce=torch.float32 if widen else None,
            ),
        )

    def teardown(self) -> None:
        """Release what the run used; the module stays divided, on its device. Ranks: every rank; waits for none."""
        self.lifecycle.teardown()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- steps -----------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Let backwards in the body reduce nothing: each rank keeps whole gradients until one that does."""
        set_reductions(self._module, False)
        try:
            yield
        finally:
            set_reductions(self._module, True)

    @property
    def step_capabilities(self) -> Capabilities:
        """What can be done with a training step: all ranks make it together, of which each has a part of the model."""
        return Capabilities(whole_gradients=False, step_alone=False, replays="together")

    # -- checkpoints -----------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is loaded once the module is divided: yes, so that each rank takes its part."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: whole ones on rank 0 for a plain file. Ranks: all, together."""
        return self._gathered(self._module.state_dict())

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer: whole on rank 0 for a plain file. Ranks: all, together."""
        return self._gathered(super().optimizer_state(optimizer))

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        return gathered(state, keep=self.is_global_zero)  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights, whole or divided. Ranks: each, alone."""
        load_weights(self._module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, whole or divided. Ranks: each, alone."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_optimizer(optimizer, state)


def _resolve_precision(plugin: Precision, requested: str | None, device_type: str) -> Precision:
    return resolve_precision(plugin, requested, device_type)


# -- Which modules are units --


def _units(module: nn.Module, rule: Any) -> list[nn.Module]:
    """Return the units of a module, inner ones first."""
    if rule == "auto":
        chosen = {id(one) for one in _repeated_blocks(module)}
        return [one for one in module.modules() if id(one) in chosen][::-1]
    names = [rule] if isinstance(rule, str) else rule

    def is_unit(name: str, one: nn.Module) -> bool:
        return bool(rule(name, one)) if callable(rule) else type(one).__name__ in names

    return [one for name, one in module.named_modules() if name and is_unit(name, one)][::-1]


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    kinds = [type(one) for one in children]
    for child in children:
        repeats = isinstance(module, (nn.ModuleList, nn.Sequential)) and kinds.count(type(child)) > 1
        if repeats and sum(p.numel() for p in child.parameters()) >= LEAST_UNIT:
            yield child
        else:
            yield from _repeated_blocks(child)


def _roots(module: nn.Module) -> Iterator[nn.Module]:
    """Return the parts of a module that are called by themselves."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _roots(child)
        elif next(child.parameters(), None) is not None:
            yield child
