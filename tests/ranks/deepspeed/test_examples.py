"""The configs of DeepSpeed's own tutorials train on two CPU ranks, with ``adapt=True``, as they are."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import ConfigurationError, LockstepDeepSpeedStrategy
from lightning_lockstep._doors.lightning import LightningModule, Trainer
from lightning_lockstep._doors.torch_internals import cpu_has_float16
from tests.common.deepspeed.example_configs import OF_DEEPSPEED
from tests.helpers import run_ranks

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

BATCH_SIZES = {"zero-infinity": 4, "zero++": 4, "cifar": 8}


class Net(LightningModule):
    def __init__(self, *, has_optimizer: bool) -> None:
        super().__init__()
        self.has_optimizer = has_optimizer
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        outputs = self.layers(inputs.to(self.layers[0].weight.dtype))
        loss = torch.nn.functional.cross_entropy(outputs.float(), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.02) if self.has_optimizer else None


def fit(config: dict[str, Any], batch_size: int, **options: Any) -> list[float]:
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    net = Net(has_optimizer="optimizer" not in config)
    trainer = Trainer(
        strategy=LockstepDeepSpeedStrategy(config=config, **options),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size))
    return net.losses


def example(name: str, folder: str) -> dict[str, Any]:
    zero = dict(OF_DEEPSPEED[name]["zero_optimization"])
    for section in ("offload_param", "offload_optimizer"):
        if section in zero:
            zero[section] = zero[section] | {"nvme_path": folder}
    config = OF_DEEPSPEED[name] | {"zero_optimization": zero}
    if "optimizer" in config:  # PyTorch's, since DeepSpeed would build its own for a minute
        params = config["optimizer"]["params"] | {"torch_adam": True}
        config["optimizer"] = config["optimizer"] | {"params": params}
    return config


def fit_examples(folder: str) -> dict[str, tuple[list[float], str]]:
    found = {}
    for name, batch_size in BATCH_SIZES.items():
        said = io.StringIO()
        with redirect_stderr(said):
            found[name] = fit(example(name, folder), batch_size, adapt=True), said
    return {name: (losses, said.getvalue()) for name, (losses, said) in found.items()}


@pytest.mark.skipif(cpu_has_float16(), reason="this CPU has float16, in which stage 0 is refused")
def test_the_tutorials_train_with_adapt(tmp_path: Any) -> None:
    one, other = run_ranks(2, fit_examples, str(tmp_path), timeout=300)
    for name, replaced in {
        "zero-infinity": ("zero_optimization.offload_optimizer.ratio=1.0 instead of", "=0.3"),
        "zero++": (
            "zero_quantized_weights=False",
            "zero_optimization.zero_quantized_gradients=False instead of",
        ),
        "cifar": ("fp16.enabled=False and bf16.enabled=True instead of fp16.enabled=True",),
    }.items():
        losses, said = one[name]
        assert len(losses) == 32 // BATCH_SIZES[name]
        assert all(loss == loss for loss in losses) and min(losses) < losses[0], name
        for words in replaced:
            assert words in said, said
        assert "instead of" not in other[name][1], "one rank says it"


def refusal(config: dict[str, Any], batch_size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        fit(config, batch_size)
    return str(caught.value)


def refusals(folder: str) -> dict[str, str]:
    found = {name: refusal(example(name, folder), size) for name, size in BATCH_SIZES.items()}
    partly = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    config = {"zero_optimization": partly, "zero_force_ds_cpu_optimizer": False}
    return found | {"ratio": refusal(config, 4)}


@pytest.mark.skipif(cpu_has_float16(), reason="this CPU has float16, in which stage 0 is refused")
def test_without_it_they_are_refused_by_name(tmp_path: Any) -> None:
    one, other = run_ranks(2, refusals, str(tmp_path), timeout=120)
    assert one == other
    assert one["ratio"].startswith("zero_optimization.offload_optimizer.ratio=0.3: DeepSpeed offloads a part")
    assert "zero_optimization.zero_quantized_gradients=True: " in one["zero++"]
    assert one["cifar"].startswith("fp16.enabled=True: ") and "loss_scale" not in one["cifar"]
