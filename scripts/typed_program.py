"""A strict program over the whole public API: `scripts/check` gives it to mypy and pyright, and nobody runs it.

Each public name is used as a program uses it, and `assert_type` holds what comes back. At the end: what a checker has
to find, each line with the reason why it is wrong.
"""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from typing_extensions import assert_type

import lightning_lockstep
from lightning_lockstep import (
    AutoBatchSize,
    BatchSizeError,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveStallError,
    ConfigurationError,
    ConsolidateCheckpoints,
    EffectiveBatchSize,
    FP32Modules,
    LaunchError,
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
    LockstepError,
    LockstepFSDPStrategy,
    LockstepMPIStrategy,
    LockstepXLASPMDStrategy,
    LockstepXLAStrategy,
    MetricMissingError,
    MissingExtraError,
    OverflowDetectedError,
    OverflowDetector,
    Preempted,
    RankFailedError,
    RankOrderedLogging,
    ReplicaCheck,
    ReplicaMismatchError,
    StaticShapes,
    StopTogether,
    StragglerMonitor,
    SyncedEarlyStopping,
    by_sample,
    check_breakpoint,
    detect_overflow,
    find_executable_batch_size,
    gather_uneven,
    get_logger,
    in_rank_order,
    notebook_launcher,
    run_in_fp32,
    set_breakpoint,
    shared,
)
from lightning_lockstep.distributed import current_communicator, register_mpi_backend, rendezvous_store
from lightning_lockstep.launchers import detect_environment

# -- Strategies and callbacks, and where they go --


def power_sgd(state: object, bucket: object) -> object:
    raise NotImplementedError


STRATEGIES: list[Strategy] = [
    LockstepDDPStrategy(start_method="spawn", grace_period=5, timeout=60, static_graph=True),
    LockstepDDPStrategy(ddp_comm_hook="fp16_compress", find_unused_parameters=True, bucket_cap_mb=10),
    LockstepMPIStrategy(
        random_numbers="of_sample",
        batch_norm="of_batch",
        backend="mpi4py",
        uneven_inputs="join",
        ddp_comm_hook=power_sgd,
        broadcast_buffers=False,
    ),
    LockstepDeepSpeedStrategy(stage=3, offload_optimizer="cpu", config={"gradient_clipping": 1.0}),
    LockstepFSDPStrategy(shard=["Block"], mesh={"shard": 2}, state_dict="sharded"),
    LockstepXLAStrategy(guard="off", downcast_bf16=True),
    LockstepXLASPMDStrategy(parameters="fsdp", patterns=["*.weight"]),
]
CALLBACKS: list[Callback] = [
    AutoBatchSize(global_batch_size=1024, on_oom="split"),
    ConsolidateCheckpoints("as_saved"),
    EffectiveBatchSize(256, lr_scaling="sqrt"),
    FP32Modules(["decoder.*"]),
    OverflowDetector(mode="hooks", action="skip"),
    RankOrderedLogging(files="json", folder="logs"),
    ReplicaCheck(every_n_steps=10, action="warn", buffers="none"),
    StaticShapes(batch_size="train", ignored={"labels": -100, 0: 0}),
    StopTogether(signals=["SIGTERM"], exit_code=None),
    StragglerMonitor(every_n_steps=10),
    SyncedEarlyStopping("val_loss", reduce="max", missing="use_present"),
]


def train(module: LightningModule) -> int | None:
    trainer = Trainer(strategy=STRATEGIES[0], callbacks=CALLBACKS, plugins=[detect_environment()])
    trainer.fit(module)
    assert_type(AutoBatchSize().optimal_batch_size, int | None)
    assert_type(AutoBatchSize().batches_split, int)
    decision = check_breakpoint(reset=True)
    if decision is not None:
        assert_type(decision.reason, str)
    return AutoBatchSize().optimal_batch_size


# -- Functions: a decorated function keeps its arguments, what goes in comes out as the same type --


@find_executable_batch_size
def epoch(batch_size: int, model: nn.Linear, *, steps: int = 2) -> float:
    return batch_size / steps


@find_executable_batch_size(starting_batch_size=256, reduce_batch_size_fn=lambda: 8)
def another(batch_size: int) -> str:
    return str(batch_size)


def functions(layer: nn.Linear, outputs: dict[str, Tensor]) -> None:
    assert_type(epoch(layer, steps=3), float)
    assert_type(another(), str)
    assert_type(gather_uneven(torch.ones(2)), list[Tensor])
    assert_type(gather_uneven(outputs), list[dict[str, Tensor]])
    assert_type(run_in_fp32(layer), nn.Linear)
    assert_type(notebook_launcher(another, num_processes=2), str)
    assert_type(detect_overflow(layer.weight, "weight"), bool)
    set_breakpoint("enough")
    with in_rank_order(per_node=True) as rank:
        assert_type(rank, int)
    with by_sample(dim=1), shared():
        layer(torch.ones(2))
    log = get_logger(__name__, "INFO")
    log.info("a line of %s", "every rank", main_process_only=False)
    communicator = current_communicator()
    assert_type(communicator.rank, int)
    assert_type(communicator.gather("a name"), list[str])
    assert_type(communicator.broadcast(3), int)
    register_mpi_backend()
    rendezvous_store(rank=0, world_size=1)


# -- Errors --


def failures(module: LightningModule) -> str:
    try:
        train(module)
    except RankFailedError as error:
        record = error.record
        return "unknown" if record is None else f"{record.rank} of {record.world_size} on {record.host}: {record.kind}"
    except ConfigurationError as error:
        return "\n".join(error.faults)
    except (CollectiveMismatchError, CollectiveStallError, CollectiveError) as error:
        return str(error)
    except (
        BatchSizeError,
        LaunchError,
        MetricMissingError,
        MissingExtraError,
        OverflowDetectedError,
        ReplicaMismatchError,
    ) as error:
        return str(error)
    except LockstepError:
        raise
    except Preempted as stopped:
        return str(stopped.code)
    return ""


# -- Wrong, and found: a checker that finds one of these right complains of the comment behind it --


def wrong(layer: nn.Linear) -> None:
    LockstepDDPStrategy(grace_perid=5)  # type: ignore[call-arg] # misspelt
    LockstepMPIStrategy(static_grap=True)  # type: ignore[call-arg] # misspelt, one that is handed on
    LockstepMPIStrategy(process_group_backend="gloo")  # type: ignore[call-arg] # called `backend` there
    LockstepDeepSpeedStrategy(stage="3")  # type: ignore[arg-type] # a number
    lightning_lockstep.NoSuchName()  # type: ignore[attr-defined] # the stub names all there are
    AutoBatchSize(on_oom="splt")  # type: ignore[arg-type] # misspelt
    epoch(8, layer)  # type: ignore[arg-type, call-arg] # the decorator adds the batch size
