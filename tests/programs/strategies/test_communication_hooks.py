"""Torch's communication hooks of DDP, and some of a user's own, over gloo and over mpi4py: which work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    optimizer_overlap_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy, LockstepMPIStrategy
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from lightning_lockstep.distributed import ddp_reducer
from lightning_lockstep.errors import CollectiveStallError
from tests.harness import run_ranks
from tests.models.distributed.mpi.launch import run_mpi
from tests.models.strategies.fsdp_models import QUIET

STEPS = 6


class Net(LightningModule):
    """Eight layers in eight buckets."""

    def __init__(self, optimizer: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(8)))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.layers(batch + self.global_rank) - batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1) if self.optimizer else None

    def digest(self) -> float:
        return sum(parameter.detach().double().abs().sum().item() for parameter in self.parameters())


def power() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2)


def chained(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations of hooks
    """A sum, and in its callback the mean of that; the ranks are made to arrive at different moments."""
    first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

    def again(future: Any) -> Any:
        values = future.value()[0] / dist.get_world_size() ** 2
        return dist.all_reduce(values, async_op=True).get_future().wait()[0]

    return first.then(again)


def chained_and_blocking(state, bucket):  # type: ignore[no-untyped-def]
    """The same, with a callback that blocks in the collective itself."""

    def again(future: Any) -> Any:
        values = future.value()[0] / dist.get_world_size() ** 2
        dist.all_reduce(values)
        return values

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


class InHook:
    """An optimizer for one parameter at a time."""

    def step_param(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.1 * gradient)


def in_optimizer() -> dict[str, Any]:
    state = optimizer_overlap_hooks._OptimizerHookState(InHook())
    return {"ddp_comm_hook": optimizer_overlap_hooks._hook_then_optimizer(default_hooks.allreduce_hook, state)}


#: Options of the strategy by name.
HOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "allreduce": lambda: {"ddp_comm_hook": default_hooks.allreduce_hook},
    "fp16": lambda: {"ddp_comm_hook": "fp16_compress"},
    "bf16": lambda: {"ddp_comm_hook": "bf16_compress"},
    "power_sgd": lambda: {"ddp_comm_hook": "power_sgd", "ddp_comm_state": power()},
    "power_sgd in fp16": lambda: {
        "ddp_comm_hook": powerSGD_hook.powerSGD_hook,
        "ddp_comm_state": power(),
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
    },
    "post-localSGD": lambda: {
        "ddp_comm_hook": post_localSGD_hook.post_localSGD_hook,
        "ddp_comm_state": post_localSGD_hook.PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=2, post_local_gradient_allreduce=False
        ),
        "model_averaging_period": 3,  # the last of six steps is one that averages
    },
    "optimizer in hook": in_optimizer,
    "own, chained": lambda: {"ddp_comm_hook": chained},
    "own, chained and blocking": lambda: {"ddp_comm_hook": chained_and_blocking},
}


def fits_with_hooks(strategy: Any) -> dict[str, float]:
    """Fit with each hook; return the weights' sum by its name."""
    warnings.simplefilter("ignore")
    found = {}
    for name, options in HOOKS.items():
        seed_everything(1, verbose=False)
        net = Net(optimizer=name != "optimizer in hook")
        made = strategy(bucket_cap_mb=0.001, **options())
        trainer = Trainer(**QUIET, devices=2, max_epochs=1, strategy=made)
        data = torch.randn(4 * STEPS, 40, generator=torch.Generator().manual_seed(5))
        trainer.fit(net, DataLoader(data, batch_size=4))
        found[name] = net.digest()
    return found


def as_expected(numbers: dict[str, float], of_rank_1: dict[str, float]) -> dict[str, float]:
    """Hold what each hook should do; return the sum of the weights by hook."""
    assert list(numbers) == list(HOOKS) and numbers == of_rank_1
    assert numbers["allreduce"] == numbers["none"] and numbers["own, chained"] == numbers["none"]
    assert numbers["power_sgd"] != numbers["none"] and numbers["fp16"] != numbers["none"]
    return numbers


def bucket_of(index: int) -> Any:
    return SimpleNamespace(buffer=lambda: torch.ones(2), index=lambda: index)


def test_a_hook_that_completes_its_futures_in_a_later_call_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ddp_reducer, "_LATER", 0.0)

    def deferring(state: Any, bucket: Any) -> Any:
        return torch.futures.Future()

    hook, _ = ddp_reducer.compression_hook(deferring, None, None, timeout=0.1)
    assert hook is not None
    with pytest.raises(CollectiveStallError, match=r"deferring returned for bucket 3 .* after 0\.1 s"):
        hook(None, bucket_of(3))


@pytest.mark.mpi
def test_each_hook_over_gloo_and_mpi4py() -> None:
    gloo = as_expected(*run_ranks(2, fits_with_hooks, LockstepDDPStrategy, backend=None, timeout=180))
    over_mpi = partial(LockstepMPIStrategy, backend="mpi4py", grace_period=5.0)
    assert as_expected(*run_mpi(2, fits_with_hooks, over_mpi)) == gloo
