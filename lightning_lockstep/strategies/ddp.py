"""DistributedDataParallel that keeps all ranks in step, on CPU and CUDA."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

from torch import Tensor
from torch.utils.hooks import RemovableHandle, unserializable_hook
from typing_extensions import Unpack

from lightning_lockstep._lightning import ClusterEnvironment, DDPStrategy
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.ddp_reducer import compression_hook, sparse_weights
from lightning_lockstep.distributed.guard.verify import verify_parameters
from lightning_lockstep.steps.capabilities import Capabilities
from lightning_lockstep.strategies.lifecycle import RankLifecycle
from lightning_lockstep.strategies.options import DDPSettings, OptionsOfDDP, settings_and_options
from lightning_lockstep.strategies.startup import OutlivingStartup, RankStartup


class LockstepDDPStrategy(RankLifecycle, DDPStrategy):
    """DDP on CPU or CUDA, one process per device, on one or several nodes.

    In addition to Lightning's ``DDPStrategy``: when a rank fails, all ranks stop and its traceback is printed
    last; the requested precision is used, or refused with an error; a table shows which rank runs where; CPU
    threads are set by the number of usable cores; ranks may have different amounts of data; gradient
    compression works on CPU too; and there is no broadcast before every batch.

    Args:
        start_method: How the ranks of a node are started if no other program starts them: ``popen`` runs the program
            again, ``spawn``, ``fork`` and ``forkserver`` use multiprocessing (``fork`` in notebooks).
        grace_period: Time from learning of a failure until a rank is ended by force [s].
        silence_limit: How long a rank may be stopped, or its host unreachable, before that counts as a failure
            [s]. A running rank sends heartbeats, whatever it computes.
        uneven_inputs: What happens if ranks have different numbers of training batches: ``error`` raises (before the
            first batch, unless a loader gives fewer batches than its length says), ``truncate`` stops all ranks when
            the first runs out, ``join`` gives ranks that have run out padding batches (their last one again, with a
            loss of zero) until the last rank is done.
        iterable_datasets: What each rank reads of an ``IterableDataset``: ``as_given`` reads all that it gives on that
            rank; ``shard`` reads the rank's part of a data set that gives the same samples on every rank. Ranks and
            DataLoader workers then take turns, so that each sample is used once, in training and in evaluation.
        random_numbers: Those of augmentation, dropout and other draws in the training step: ``of_rank`` follow seed and
            rank; ``of_sample`` follow seed, epoch and the sample's position in it, so that they are the same on any
            number of ranks (see :func:`by_sample`).
        batch_norm: Whether the statistics of batch norm in training are ``of_rank`` or ``of_batch``, the whole global
            micro-batch, as in one process: two small collectives for each norm.
        threads_per_rank: CPU threads per rank; ``auto`` is usable cores / ranks of the node, unless
            ``OMP_NUM_THREADS`` is set.
        timeout: Longest wait for another rank in a collective [s].
        guard: ``watch`` finds out why a collective does not complete, and all ranks raise the same error;
            ``verify`` also compares what the ranks call before each collective; ``off`` does neither.
        stall_timeout: How long a collective may take before the ranks compare where they are [s].
        process_group_backend: ``gloo``, ``nccl`` or another registered one; by default the one for the device.
        ddp_comm_hook: Gradient compression: ``fp16_compress``, ``bf16_compress``, ``power_sgd``, or a
            communication hook as torch documents it.
        ddp_comm_state: State for a hook given as a function.
        gradient_as_bucket_view: Whether gradients live in the buckets that are reduced, which saves a copy.
        on_lost_rank: What the death of a rank's process does: ``end`` ends all ranks; with ``continue`` the others go
            on, with the same numbers. On CPUs, for ranks that this package starts.
        least_ranks: With ``continue``, the run ends if fewer are left.
        spares: With ``continue``, how many more processes wait on each host to take the places of lost ranks; for
            each process of the start that is lost, a new one is started, which joins or waits.
        cluster_environment: Tells which rank this process is; by default the environment variables do. (One among the
            Trainer's plugins is used only if the strategy is given by its name.)
        options: Further options of :class:`torch.nn.parallel.DistributedDataParallel`, such as
            ``static_graph``, ``find_unused_parameters``, ``bucket_cap_mb``, and Lightning's
            ``accelerator``, ``parallel_devices``, ``checkpoint_io``, ``precision_plugin``.

    Raises:
        ConfigurationError: One message with everything that cannot be used.

    Ranks: construct it in every process with the same arguments. At start-up all ranks connect once; then
        nothing is sent beyond DDP's own gradient reductions until a rank fails.
    """

    strategy_name = "lockstep_ddp"
    settings: DDPSettings
    step_capabilities = Capabilities()  # each rank has the whole model and its gradients

    def __init__(
        self,
        *,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        grace_period: float = 10.0,
        silence_limit: float = 120.0,
        uneven_inputs: Literal["error", "truncate", "join"] = "error",
        iterable_datasets: Literal["as_given", "shard"] = "as_given",
        random_numbers: Literal["of_rank", "of_sample"] = "of_rank",
        batch_norm: Literal["of_rank", "of_batch"] = "of_rank",
        threads_per_rank: int | Literal["auto"] = "auto",
        timeout: float | timedelta = 1800.0,
        guard: Literal["off", "watch", "verify"] = "watch",
        stall_timeout: float = 60.0,
        process_group_backend: str | None = None,
        ddp_comm_hook: Literal["fp16_compress", "bf16_compress", "power_sgd"] | Callable[..., Any] | None = None,
        ddp_comm_state: object | None = None,
        gradient_as_bucket_view: bool = True,
        on_lost_rank: Literal["end", "continue"] = "end",
        least_ranks: int = 1,
        spares: int = 0,
        cluster_environment: ClusterEnvironment | None = None,
        **options: Unpack[OptionsOfDDP],
    ) -> None:
        self.settings, handed_on = settings_and_options(DDPSettings, OptionsOfDDP, locals())
        self._comm_wrapper = options.get("ddp_comm_wrapper")
        super().__init__(
            self.make_startup(),
            cluster_environment=cluster_environment,
            ddp_comm_state=ddp_comm_state,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **handed_on,
        )
        self._hooks: list[RemovableHandle] = []

    def make_startup(self) -> RankStartup:
        """Return how the ranks are started and connected."""
        if self.settings.on_lost_rank == "continue":
            return OutlivingStartup("popen", self.settings.process_group_backend)
        return RankStartup(self.settings.start_method, self.settings.process_group_backend)

    def configure_ddp(self) -> None:
        """Wrap the model in DistributedDataParallel and register the gradient compression hook.

        Under ``guard="verify"`` the ranks compare their parameters first.

        Ranks: all, together.
        """
        if self.settings.guard == "verify":
            verify_parameters(self.model, current_communicator().gather)  # type: ignore[arg-type] # not wrapped yet
        super().configure_ddp()
        for weight in sparse_weights(self.model):  # type: ignore[arg-type] # wrapped just now
            # DDP divides sparse gradients in place, although another tensor's gradient may share their values.
            self._hooks.append(weight.register_hook(_copied))  # type: ignore[no-untyped-call]
        # Lightning would register a communication hook on CUDA only, so the hook is registered here.
        hook, state = compression_hook(
            self.settings.ddp_comm_hook,
            self.settings.ddp_comm_state,
            self._comm_wrapper,
            timeout=self.settings.duration.total_seconds(),
        )
        if hook is not None:
            self.model.register_comm_hook(state, hook)  # type: ignore[union-attr,operator] # wrapped just now

    def teardown(self) -> None:
        """See :meth:`RankLifecycle.teardown`."""
        while self._hooks:
            self._hooks.pop().remove()
        super().teardown()


@unserializable_hook  # type: ignore[untyped-decorator]
def _copied(gradient: Tensor) -> Tensor:
    return gradient.clone()
