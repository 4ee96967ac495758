"""What strategies can do, by what they are or state."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.steps.capabilities import Capabilities, capabilities_of, missing_capabilities

ALL = ("whole_gradients", "step_alone", "sees_out_of_memory")


def made(name: str) -> pl.strategies.Strategy:
    return object.__new__(getattr(pl.strategies, name))


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_a_strategy_that_shards_or_steps_itself(name):
    why = missing_capabilities(made(name), *ALL)
    assert len(why) == 2 and "`.grad`" in why[0] and "divides the model" in why[1]


def test_ddp_and_a_single_device():
    for strategy in (
        pl.strategies.SingleDeviceStrategy("cpu"),
        pl.strategies.DDPStrategy(parallel_devices=[torch.device("cpu")]),
        LockstepDDPStrategy(parallel_devices=[torch.device("cpu")]),
    ):
        strategy._local_rank = 0
        assert capabilities_of(strategy) == Capabilities()


def test_xla_by_its_device():
    on_xla = type("Other", (pl.strategies.SingleDeviceStrategy,), {"root_device": torch.device("xla")})
    (why,) = missing_capabilities(object.__new__(on_xla), "step_alone", "sees_out_of_memory")
    assert "later than they are called" in why


def test_a_strategy_states_it_itself_whatever_its_name():
    class MyDeepSpeedFSDPXLAStrategy(pl.strategies.SingleDeviceStrategy):
        step_capabilities = Capabilities(sees_out_of_memory=False)

    strategy = MyDeepSpeedFSDPXLAStrategy("cpu")
    assert not missing_capabilities(strategy, "whole_gradients", "step_alone")
    assert missing_capabilities(strategy, "sees_out_of_memory")
