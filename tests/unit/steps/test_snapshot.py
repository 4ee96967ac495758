"""State put back exactly, in the very objects that others may hold."""

from __future__ import annotations

import torch
from torch import nn

from lightning_lockstep.steps.snapshot import (
    BufferCopies,
    ModuleAttributes,
    OptimizerState,
    Snapshot,
)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(2), nn.Linear(2, 2)
        self.count, self.total = 0, torch.zeros(2)
        self.nested = {"inner": [torch.zeros(2), {"deep": torch.ones(1)}], "plain": [1]}
        self.nested["itself"] = self.nested
        self.seen = {1, 2}


def test_plain_attributes_at_any_depth_in_place():
    module = Module()
    inner, deep, total = module.nested["inner"], module.nested["inner"][1]["deep"], module.total
    with Snapshot(ModuleAttributes(module)):
        module.count, module.added = 5, True
        module.total += 1
        deep += 4
        inner[0] += 1
        inner.append("more")
        module.nested["plain"] = [2, 3]
        module.seen.clear()
        module.total = None
        module.eval()
    assert module.count == 0 and not hasattr(module, "added") and module.seen == {1, 2}
    assert module.total is total and total.tolist() == [0, 0]
    assert module.nested["inner"] is inner and len(inner) == 2 and inner[0].tolist() == [0, 0]
    assert inner[1]["deep"] is deep and deep.tolist() == [1] and module.nested["plain"] == [1]
    assert module.nested["itself"] is module.nested
    assert module.training and module.norm.training


def test_a_tensor_that_did_not_change_is_not_written():
    module = Module()
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * module.total).sum()
    with Snapshot(ModuleAttributes(module)):
        pass
    loss.backward()  # raises where a saved tensor has been written
    assert weight.grad is not None


def test_buffers_at_the_last_refresh_also_after_one_was_exchanged():
    module = Module()
    copies = BufferCopies(module)
    module.norm(torch.randn(4, 2))
    copies.refresh()
    mean, values = module.norm.running_mean, module.norm.running_mean.tolist()
    module.norm(torch.randn(4, 2))
    module.norm.running_mean = torch.full((2,), 9.0)
    copies.restore()
    assert module.norm.running_mean is mean and mean.tolist() == values
    assert int(module.norm.num_batches_tracked) == 1


def test_optimizers_with_lists_in_their_state():
    module = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (module(torch.ones(4, 2)) - 3).pow(2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    before = repr(optimizer.state_dict())
    with Snapshot(OptimizerState(optimizer)):
        module.weight.data += 1
        optimizer.step(closure)
        optimizer.param_groups[0].update(added=1, lr=0.5)
        assert repr(optimizer.state_dict()) != before
    assert repr(optimizer.state_dict()) == before
