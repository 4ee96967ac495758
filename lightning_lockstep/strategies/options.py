"""The settings of strategies, the options that they hand on, and the table of which rank runs where."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypedDict, TypeVar

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    Precision,
)
from lightning_lockstep._settings import Faults, is_number, is_whole, settings_of
from lightning_lockstep._system import usable_cores
from lightning_lockstep._text import plain_table, ranges, say, size_in_words
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.ddp_reducer import HOOKS
from lightning_lockstep.launchers.rank_supervisor import SupervisorSettings

_log = logging.getLogger(__name__)
_Settings = TypeVar("_Settings", bound="LifecycleSettings")


@dataclass(frozen=True, kw_only=True)
class LifecycleSettings(SupervisorSettings):
    """Settings of the life cycle of a strategy's ranks; see :class:`LockstepDDPStrategy` for the meaning."""

    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    uneven_inputs: Literal["error", "truncate", "join"] = "error"
    iterable_datasets: Literal["as_given", "shard"] = "as_given"
    random_numbers: Literal["of_rank", "of_sample"] = "of_rank"
    batch_norm: Literal["of_rank", "of_batch"] = "of_rank"
    timeout: float | timedelta = 1800.0

    def check(self, faults: Faults) -> None:
        """See :meth:`GuardSettings.check`."""
        super().check(faults)
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        usable = is_number(seconds) and seconds > 0
        faults.check(usable, "timeout", self.timeout, "seconds, more than 0, such as 1800")

    @property
    def duration(self) -> timedelta:
        """The timeout as a timedelta."""
        return self.timeout if isinstance(self.timeout, timedelta) else timedelta(seconds=self.timeout)


@dataclass(frozen=True, kw_only=True)
class DDPSettings(LifecycleSettings):
    """Settings of a strategy that wraps the model in DistributedDataParallel."""

    process_group_backend: str | None = None
    ddp_comm_hook: Literal["fp16_compress", "bf16_compress", "power_sgd"] | Callable[..., Any] | None = None
    ddp_comm_state: object | None = None
    gradient_as_bucket_view: bool = True
    on_lost_rank: Literal["end", "continue"] = "end"
    least_ranks: int = 1
    spares: int = 0

    def check(self, faults: Faults) -> None:
        super().check(faults)
        if isinstance(self.ddp_comm_hook, str):
            faults.choice("ddp_comm_hook", self.ddp_comm_hook, HOOKS, more="or a function")
        faults.whole("least_ranks", self.least_ranks, what="a whole number of ranks")
        if faults.whole("spares", self.spares, least=0, what="a whole number of processes"):
            is_used = not self.spares or self.on_lost_rank == "continue"
            faults.check(is_used, "spares", self.spares, "0 unless on_lost_rank='continue'")


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings(LifecycleSettings):
    """Settings of the strategy of DeepSpeed that are not part of DeepSpeed's configuration."""

    adapt: bool = False
    exclude_frozen_parameters: bool = False
    process_group_backend: str | None = None

    def check(self, faults: Faults) -> None:
        super().check(faults)
        faults.choice("start_method", self.start_method, ("popen",))


@dataclass(frozen=True, kw_only=True)
class FSDPSettings(LifecycleSettings):
    """Settings of the strategy that divides a model by torch's ``fully_shard``."""

    shard: str | Sequence[str] | Callable[[str, Any], bool] = "auto"
    reshard_after_forward: bool = True
    offload: Literal["none", "cpu"] = "none"
    mesh: Mapping[str, int] | None = None
    activation_checkpointing: bool = False
    reduce_dtype: Literal["float32", "compute"] = "float32"
    state_dict: Literal["full", "sharded"] = "full"
    process_group_backend: str | None = None

    def check(self, faults: Faults) -> None:
        super().check(faults)
        names = [self.shard] if isinstance(self.shard, str) else self.shard
        is_list = isinstance(names, Sequence) and all(isinstance(one, str) and one for one in names)
        expected = "'auto', the name of a class of modules, a list of such names, or a function of name and module"
        faults.check(is_list or callable(self.shard), "shard", self.shard, expected)
        if self.state_dict == "sharded" and self.start_method != "popen":
            faults.add(
                f"start_method={self.start_method!r} with state_dict='sharded': expected 'popen', because other ranks"
                " return their weights to this process as whole tensors."
            )
        if self.mesh is not None:
            sizes = self.mesh if isinstance(self.mesh, Mapping) else {}
            known = bool(sizes) and set(sizes) <= {"shard", "replicate"}
            are_sizes = all(is_whole(n) and n > 0 for n in sizes.values())
            expected = "sizes of 'shard' and 'replicate', such as {'shard': 4, 'replicate': 2}"
            faults.check(known and are_sizes, "mesh", self.mesh, expected)


# -- Options that are handed on unchanged, with the defaults of the class that takes them --
# Type checkers, editors and LightningCLI read their names here. A plain `**options` would let misspelt names through,
# and LightningCLI would take the names from the constructors of the base classes.


class OptionsOfEach(TypedDict, total=False):
    """Options of each strategy with one process per device; see :class:`LockstepDDPStrategy` for the meaning."""

    grace_period: float
    silence_limit: float
    uneven_inputs: Literal["error", "truncate", "join"]
    iterable_datasets: Literal["as_given", "shard"]
    random_numbers: Literal["of_rank", "of_sample"]
    batch_norm: Literal["of_rank", "of_batch"]
    threads_per_rank: int | Literal["auto"]
    timeout: float | timedelta
    guard: Literal["off", "watch", "verify"]
    stall_timeout: float
    cluster_environment: ClusterEnvironment | None


class OptionsOfXLA(OptionsOfEach, total=False):
    """Options of a strategy for XLA devices, in addition to its own."""

    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None


class OptionsOfLightning(TypedDict, total=False):
    """What a strategy hands on to Lightning's."""

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    precision_plugin: Precision | None


class OptionsOfRanks(OptionsOfEach, OptionsOfLightning, total=False):
    """Options of a strategy that starts its ranks and connects them by torch, in addition to its own."""

    start_method: Literal["popen", "spawn", "fork", "forkserver"]
    process_group_backend: str | None


class OptionsOfDDP(OptionsOfLightning, total=False):
    """What a strategy hands on to Lightning's DDPStrategy, and to torch's DistributedDataParallel in the end."""

    checkpoint_io: CheckpointIO | None
    ddp_comm_wrapper: Callable[..., Any] | None
    model_averaging_period: int | None
    dim: int
    broadcast_buffers: bool | None
    init_sync: bool
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    check_reduction: bool
    static_graph: bool
    delay_all_reduce_named_params: list[tuple[str, torch.nn.Parameter]] | None
    param_to_hook_all_reduce: torch.nn.Parameter | None
    mixed_precision: Any
    device_mesh: Any
    skip_all_reduce_unused_params: bool
    bucket_cap_mb_list: list[int] | None
    lazy_bucket_allocation: bool
    batched_grad_copy: bool
    forward_sync_buffers: bool | None


class OptionsOfMPI(OptionsOfEach, OptionsOfDDP, total=False):
    """Options of the strategy over MPI, in addition to its own."""

    ddp_comm_hook: Literal["fp16_compress", "bf16_compress", "power_sgd"] | Callable[..., Any] | None
    ddp_comm_state: object | None
    gradient_as_bucket_view: bool


def settings_and_options(
    settings: type[_Settings], accepted: Any, given: Mapping[str, Any]
) -> tuple[_Settings, dict[str, Any]]:
    """Return the settings of a strategy, and the options that it hands on; raise for any other."""
    # `given`: its constructor's arguments; those that it does not name are in ``options``, with keys of `accepted`.
    strategy, options = type(given["self"]), given["options"]
    names = {field.name for field in fields(settings)}
    of_ddp = inspect.signature(DDPStrategy).parameters | inspect.signature(DistributedDataParallel).parameters
    # Those that the installed releases of Lightning and torch do not have are unknown.
    known = accepted.__optional_keys__ - (OptionsOfDDP.__optional_keys__ - of_ddp.keys())
    own = {
        name
        for cls in strategy.__mro__
        for name, parameter in inspect.signature(cls.__init__).parameters.items()  # type: ignore[misc]
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    faults = Faults()
    faults.unknown(options, {*known, *own}, owner=strategy.__name__)
    faults.raise_all()
    handed_on = {name: value for name, value in options.items() if name not in names}
    return settings_of(settings, {**given, **options}), handed_on


# -- Which rank runs where, shown once, and a warning that names the slowest GPU if GPUs differ --


#: A rank's row of the table; and capability, memory and name of its GPU if it has one, by which GPUs are compared.
Placement = tuple[tuple[Any, ...], tuple[int, int, int, str] | None]


def show_placement(communicator: Communicator, device: torch.device, threads: int) -> None:
    """Show which rank runs where. Ranks: all, together; a gather."""
    placements = communicator.gather(placement_of(communicator, device, threads))
    if communicator.is_main:
        headings = ("rank", "host", "device", "memory", "threads", "cores")
        say(f"{len(placements)} ranks\n{plain_table(headings, [row for row, _ in placements])}")
        if warning := mixed_gpus_warning(placements):
            _log.warning(warning)


def placement_of(communicator: Communicator, device: torch.device, threads: int) -> Placement:
    """Return where this rank runs; on CUDA this asks the driver."""
    name, memory, gpu = str(device), None, None
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        name, memory = f"{device} {found.name}", found.total_memory
        gpu = found.major, found.minor, found.total_memory, found.name
    elif device.type == "cpu":
        memory = psutil.virtual_memory().total
    rank, host, cores = communicator.rank, communicator.host, ranges(usable_cores())
    return (rank, host, name, size_in_words(memory), threads, cores), gpu


def mixed_gpus_warning(placements: Sequence[Placement]) -> str | None:
    """Return a warning that names the slowest GPU when the GPUs differ, else ``None``."""
    gpus = sorted((gpu, row) for row, gpu in placements if gpu is not None)
    if not gpus or gpus[0][0] == gpus[-1][0]:
        return None
    slowest, fastest = (
        f"rank {rank} on {host} has {name} ({memory}, compute capability {major}.{minor})"
        for (major, minor, _, name), (rank, host, _, memory, *_) in (gpus[0], gpus[-1])
    )
    return f"This run has mixed GPUs, and every step waits for the slowest: {slowest}, {fastest}."
