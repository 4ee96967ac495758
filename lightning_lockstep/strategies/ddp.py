"""DistributedDataParallel that keeps all ranks in step, on CPU and CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module

from lightning_lockstep._environment import launcher_pid
from lightning_lockstep._lightning import (
    ClusterEnvironment,
    DDPStrategy,
    TrainerFn,
    _DDPForwardRedirection,
    _register_ddp_comm_hook,
    reset_seed,
)
from lightning_lockstep._lightning.internals import reloads_training_loader
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.ddp_comm_hooks import compression_hook
from lightning_lockstep.distributed.process_group import (
    default_backend,
    process_group_exists,
    start_process_group,
)
from lightning_lockstep.launchers.cluster_environment import LockstepEnvironment, detect_environment
from lightning_lockstep.launchers.multiprocessing import SpawnedLauncher
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher
from lightning_lockstep.numerics.precision import requested_precision, resolve_precision
from lightning_lockstep.strategies.options import DDPSettings, reject_unknown
from lightning_lockstep.strategies.placement import mixed_cards_warning, placement_of, show_placement
from lightning_lockstep.strategies.uneven_inputs import EvenLoader, even_loader

__all__ = ["LockstepDDPStrategy"]

_log = logging.getLogger(__name__)


class LockstepDDPStrategy(DDPStrategy):
    """DDP on CPU or CUDA, one process a device, on one or several nodes.

    What it adds to Lightning's: a rank that fails ends all of them, with its own traceback printed last; the
    precision that was asked for or an error; a table of who runs where; CPU threads from the cores there are;
    an answer to ranks with different amounts of data; gradient compression on CPU too; and no broadcast
    before every batch.

    Args:
        start_method: How the ranks of a node are started where nobody else does: ``popen`` runs the program
            again, ``spawn``, ``fork`` and ``forkserver`` use multiprocessing (``fork`` in notebooks).
        on_rank_failure: ``abort``: when a rank fails, all end.
        grace_period: Time from the news of a failure until a rank is ended by force [s].
        uneven_inputs: When ranks have different numbers of training batches: ``error`` says so before the
            first one, ``truncate`` stops all with the first, ``join`` lets ranks without data repeat their
            last batch with a loss of zero until the last rank is done.
        threads_per_rank: CPU threads of a rank; ``auto`` is usable cores / ranks of the node.
        bind_cores: Whether each rank is pinned to its own cores.
        timeout: Longest wait for another rank in a collective [s].
        process_group_backend: ``gloo``, ``nccl`` or another registered one; by default that of the device.
        ddp_comm_hook: Gradient compression: ``fp16_compress``, ``bf16_compress``, ``power_sgd``, or a
            function as torch documents it.
        ddp_comm_state: State for a hook given as a function.
        gradient_as_bucket_view: Whether gradients live in the buckets that are reduced, which saves a copy.
        cluster_environment: Who started the ranks; by default read from environment variables.
        options: Further options of :class:`torch.nn.parallel.DistributedDataParallel`, such as
            ``static_graph``, ``find_unused_parameters``, ``bucket_cap_mb``, and Lightning's
            ``accelerator``, ``parallel_devices``, ``checkpoint_io``, ``precision_plugin``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.

    Ranks: construct it alike in every process. At start-up all ranks meet once; then nothing is sent beyond
    DDP's own gradient reductions until something is wrong.
    """

    strategy_name = "lockstep_ddp"
    cluster_environment: ClusterEnvironment  # never None here, unlike in Lightning's annotation

    def __init__(
        self,
        *,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        on_rank_failure: Literal["abort"] = "abort",
        grace_period: float = 10.0,
        uneven_inputs: Literal["error", "truncate", "join"] = "error",
        threads_per_rank: int | Literal["auto"] = "auto",
        bind_cores: bool = False,
        timeout: float | timedelta = 1800.0,
        process_group_backend: str | None = None,
        ddp_comm_hook: str | Callable[..., Any] | None = None,
        ddp_comm_state: object | None = None,
        gradient_as_bucket_view: bool = True,
        cluster_environment: Any | None = None,
        **options: Any,
    ) -> None:
        base = {name: options.pop(name) for name in _OF_LIGHTNING if name in options}
        reject_unknown(options, type(self))
        self.settings = DDPSettings(
            start_method=start_method,
            uneven_inputs=uneven_inputs,
            timeout=timeout,
            ddp_comm_hook=ddp_comm_hook,
        )
        self.supervisor = RankSupervisor(
            SupervisorSettings(
                on_rank_failure=on_rank_failure,
                grace_period=grace_period,
                threads_per_rank=threads_per_rank,
                bind_cores=bind_cores,
            )
        )
        super().__init__(
            cluster_environment=cluster_environment or detect_environment(),
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self.settings.seconds or 0),
            start_method=start_method,
            ddp_comm_state=ddp_comm_state,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **base,
            **options,
        )
        self._forward_redirection = _ContributingRedirection(self)
        self._uneven_loaders: list[EvenLoader] = []

    def _configure_launcher(self) -> None:
        # The Trainer is under construction here: the last moment at which a fault stops it before any rank.
        requested = requested_precision()
        self.precision_plugin = resolve_precision(self.precision_plugin, requested, self.root_device.type)
        if self._start_method == "popen" or self.cluster_environment.creates_processes_externally:
            self._launcher = ScriptLauncher(
                self.supervisor,
                self.cluster_environment,
                num_processes=self.num_processes,
                num_nodes=self.num_nodes,
            )
        else:
            self._launcher = SpawnedLauncher(self, self.supervisor, start_method=self._start_method)

    def setup_distributed(self) -> None:
        """Make the process group, open the side channel and show who runs where.

        Ranks: all, together.
        """
        reset_seed()
        self.set_world_ranks()
        self._apply_threads()
        first_time = not process_group_exists()
        self._process_group_backend = self._process_group_backend or default_backend(self.root_device)
        start_process_group(
            self._process_group_backend,
            rank=self.global_rank,
            world_size=self.world_size,
            address=self.cluster_environment.main_address,
            port=self.cluster_environment.main_port,
            timeout=timedelta(seconds=self.settings.seconds or 0),
            device=self.root_device,
        )
        communicator = self.supervisor.ranks_have_met(prints_report=self._owns_a_terminal())
        if first_time and communicator.world_size > 1:
            placements = communicator.gather(
                placement_of(
                    self.root_device,
                    rank=self.global_rank,
                    host=communicator.host,
                    threads=self.supervisor.threads,
                    cores=self.supervisor.cores,
                )
            )
            if communicator.is_main:
                show_placement(placements)
                warning = mixed_cards_warning(placements)
                if warning:
                    _log.warning(warning)

    def _apply_threads(self) -> None:
        self.supervisor.apply_threads(local_rank=self.local_rank, local_world_size=self.num_processes)

    def _owns_a_terminal(self) -> bool:
        """Return whether this rank prints reports: rank 0, and the first rank of a node started by hand."""
        ours = isinstance(self.cluster_environment, LockstepEnvironment)
        return self.global_rank == 0 or (ours and launcher_pid() is None and self.num_nodes > 1)

    def process_dataloader(self, dataloader: object) -> object:
        """Make every rank take the same number of training batches.

        Ranks: all, together, once for each loader; one gather for a training loader.
        """
        dataloader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or not _is_for_training(trainer):
            return dataloader
        loader = even_loader(dataloader, current_communicator(), self.settings.uneven_inputs)
        if isinstance(loader, EvenLoader):
            self._uneven_loaders.append(loader)
        return loader

    def is_padding_batch(self) -> bool:
        """Return whether this rank's current training batch is a repeat that must contribute nothing.

        Ranks: any rank, alone.
        """
        if self.settings.uneven_inputs != "join" or not self._uneven_loaders:
            return False
        own = [loader.own_batches for loader in self._uneven_loaders]
        if any(count is None for count in own):
            return False
        assert self.lightning_module is not None
        batch_idx = self.lightning_module.trainer.fit_loop.epoch_loop.batch_idx
        return bool(batch_idx >= max(count for count in own if count is not None))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for every rank; after a failure, for nobody.

        Ranks: all, together.
        """
        if self.supervisor.propagation is not None and self.supervisor.propagation.failed:
            return
        super().barrier(*args, **kwargs)

    def _register_ddp_hooks(self) -> None:
        hook, state = compression_hook(self.settings.ddp_comm_hook, self._ddp_comm_state)
        if hook is not None:
            self._ddp_comm_state = state
            _register_ddp_comm_hook(
                model=self.model,  # type: ignore[arg-type] # wrapped by configure_ddp before this
                ddp_comm_state=state,
                ddp_comm_hook=hook,
                ddp_comm_wrapper=self._ddp_comm_wrapper,
            )

    def teardown(self) -> None:
        """Give back what the run used; the ranks stay connected for a next call of the Trainer.

        Ranks: every rank; waits for nobody.
        """
        self._uneven_loaders.clear()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Do nothing: the package registers its strategies when it is imported."""


_OF_LIGHTNING = (
    "accelerator",
    "parallel_devices",
    "checkpoint_io",
    "precision_plugin",
    "ddp_comm_wrapper",
    "model_averaging_period",
)


class _ContributingRedirection(_DDPForwardRedirection):
    """Makes every rank take part in the reductions of every step.

    A training_step that returns ``None``, and a batch that only repeats another rank's turn, contribute
    gradients of zero, so that the other ranks get what they wait for.
    """

    def __init__(self, strategy: LockstepDDPStrategy) -> None:
        self._strategy = strategy

    def __call__(
        self, wrapper_module: Module, original_module: Any, method_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if method_name != "training_step" or not original_module.automatic_optimization:
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        original = original_module.training_step
        # A callback may have put its own in the module's place, as OverflowDetector does.
        former = original_module.__dict__.get("training_step")

        def contributing(*a: Any, **k: Any) -> Any:
            output = original(*a, **k)
            if output is None:
                return nothing_of(original_module)
            if self._strategy.is_padding_batch():
                return _without_weight(output, original_module)
            return output

        original_module.training_step = contributing
        try:
            return super().__call__(wrapper_module, original_module, method_name, *args, **kwargs)
        finally:
            del original_module.training_step
            if former is not None:
                original_module.training_step = former


def nothing_of(module: Module) -> Tensor:
    """Return a loss of zero that depends on every trainable parameter, with gradients of zero.

    Args:
        module: The module whose gradients are reduced.
    """
    parts = [p.view(-1)[:1].sum() * 0.0 for p in module.parameters() if p.requires_grad and p.numel()]
    return torch.stack([part.float() for part in parts]).sum()


def _without_weight(output: Any, module: Module) -> Any:
    if isinstance(output, Tensor):
        return nothing_of(module)
    return {**output, "loss": nothing_of(module)}


def _is_for_training(trainer: Any) -> bool:
    """Return whether the loader in hand is one of the fit loop's own, not one of a validation inside it."""
    if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
        return False
    return trainer.train_dataloader is None or reloads_training_loader(trainer)
