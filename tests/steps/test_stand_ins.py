"""Parameters that stand in for others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_lockstep.deepspeed.engine_trials import stand_in_parameters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.rnn = nn.LSTM(4, 4, num_layers=2, bidirectional=True)
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.project.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.project(self.norm(self.rnn(self.embed(x))[0]))).logsumexp(-1).sum()


def test_gradients_go_to_the_stand_ins_and_hooks_stay_silent():
    torch.manual_seed(0)
    model, called = Model(), []
    x = torch.arange(7)
    twin = copy.deepcopy(model)
    twin(x).backward()
    before = dict(model.named_parameters())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(called.append)
            parameter.register_hook(called.append)
    with stand_in_parameters(model):
        inside = dict(model.named_parameters())
        assert list(inside) == list(before) and not any(inside[name] is before[name] for name in before)
        assert model.head.weight is model.embed.weight
        assert all(inside[name].data_ptr() == before[name].data_ptr() for name in before)
        model(x).backward()
        gradients = {name: parameter.grad for name, parameter in inside.items()}
    for name, parameter in twin.named_parameters():
        assert (gradients[name] is None) == (parameter.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad)
    assert not called and all(parameter.grad is None for parameter in before.values())
    assert all(now is before[name] for name, now in model.named_parameters())
    model(x).backward()
    assert called, "the parameters of the run are back, with their hooks"
    torch.testing.assert_close(model.rnn.weight_ih_l0.grad, twin.rnn.weight_ih_l0.grad)


def test_they_are_put_back_after_an_error():
    model = nn.Linear(2, 2)
    weight = model.weight
    with pytest.raises(KeyError), stand_in_parameters(model):
        raise KeyError
    assert model.weight is weight and list(model._parameters) == ["weight", "bias"]
