"""Fits under real DeepSpeed on two CPU ranks: the numbers of DDP, checkpoints of every stage, what is refused.

Starting ranks is what costs, and importing DeepSpeed, so three pairs of ranks run all the fits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import (
    ConfigurationError,
    ConsolidateCheckpoints,
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
)
from lightning_lockstep._lightning import LightningModule, ModelCheckpoint, Trainer
from tests.harness import MODELS, QUIET, chosen_device, on_device, run_ranks, run_script
from tests.models.distributed.mpi.launch import mpi_environ

STAGES = (0, 1, 2, 3)
#: DeepSpeed takes the local rank for the index of the card, so that two ranks cannot share one.
RANKS = {"cpu": (2, "gloo"), "cuda": (1, "nccl")}


class Net(LightningModule):
    """A frozen layer, a buffer and a size that two ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(8, 33), torch.nn.Linear(33, 3)
        self.norm = torch.nn.LayerNorm(33)
        self.register_buffer("scale", torch.tensor(0.5))
        self.frozen = torch.nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.frozen(self.second(self.scale * self.norm(self.first(inputs)).relu()))
        return outputs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self(inputs).float(), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self(inputs).float(), targets)
        self.log("val_loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class WithSGD(Net):
    """Unlike Adam's, its steps are as large as the gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1, momentum=0.9)


def loader(batch_size: int = 8) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size)


def trainer(strategy: Any, **options: Any) -> Trainer:
    ranks = int(os.environ.get("WORLD_SIZE", 2))
    settings = {**QUIET, **on_device(ranks), "max_epochs": 1, **options}
    return Trainer(strategy=strategy, **settings)


def curve(strategy: Any, net: Net | None = None, *, batch_size: int = 8, **options: Any) -> list[float]:
    net = Net() if net is None else net
    trainer(strategy, **options).fit(net, loader(batch_size), loader())
    return net.losses


# -- the numbers ---------------------------------------------------------------------------------------


def curves() -> dict[str, Any]:
    """Epochs of four batches, of which the last one makes a step of its own."""
    common: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3, "max_epochs": 2}
    found: dict[str, Any] = {"ddp": curve(LockstepDDPStrategy(), **common)}
    for stage in STAGES:
        found[f"stage {stage}"] = curve(LockstepDeepSpeedStrategy(stage=stage), **common)
    bare = {name: value for name, value in common.items() if name == "max_epochs"}
    by_config = {
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
    }
    found["the same by its own config"] = curve(LockstepDeepSpeedStrategy(config=by_config), **bare)
    found["verified"] = curve(LockstepDeepSpeedStrategy(stage=2, guard="verify"), **common)
    offloaded = LockstepDeepSpeedStrategy(stage=2, offload_optimizer="cpu")
    with_sgd = {"accumulate_grad_batches": 3, "max_epochs": 2}
    found["ddp, SGD"] = curve(LockstepDDPStrategy(), WithSGD(), **with_sgd)
    found["stage 2, SGD"] = curve(LockstepDeepSpeedStrategy(stage=2), WithSGD(), **with_sgd)
    if chosen_device() == "cpu":  # DeepSpeed would first compile its optimizer for the host of a card
        found["offloaded"] = curve(offloaded, **common)
    return found


def test_every_stage_has_the_loss_curve_of_ddp(device: str) -> None:
    ranks, backend = RANKS[device]
    for found in run_ranks(ranks, curves, backend=backend, timeout=240):
        assert found.pop("stage 2, SGD") == pytest.approx(found.pop("ddp, SGD"), abs=2e-6)
        expected = found.pop("ddp")
        assert len(expected) == 16 // ranks and expected[-1] < expected[0]
        for name, losses in found.items():
            assert losses == pytest.approx(expected, abs=2e-6), name


def half_curves() -> dict[str, list[float]]:
    whole = curve(LockstepDDPStrategy(), max_epochs=2)
    named = curve(LockstepDeepSpeedStrategy(stage=2), max_epochs=2, precision="bf16-mixed")
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    by_config = curve(LockstepDeepSpeedStrategy(config=config), max_epochs=2)
    divided = curve(LockstepDeepSpeedStrategy(stage=3), max_epochs=2, precision="bf16-true")
    return {"float32": whole, "named": named, "by config": by_config, "stage 3": divided}


def test_bf16_is_asked_for_by_the_trainer_or_by_the_config(found: Found) -> None:
    for answers in found["bf16"]:
        assert answers["named"] == answers["by config"] != answers["float32"]
        for losses in answers.values():
            assert losses == pytest.approx(answers["float32"], abs=0.02)


# -- checkpoints ---------------------------------------------------------------------------------------


def checkpoints(folder: str, stages: tuple[int, ...]) -> dict[Any, Any]:
    """Fit, evaluate from the best, resume from the last, and consolidate, for each stage."""
    found: dict[Any, Any] = {}
    for stage in stages:
        saver = ModelCheckpoint(
            f"{folder}/{stage}", "best", monitor="val_loss", save_last=True, enable_version_counter=False
        )
        options: dict[str, Any] = {
            "callbacks": [saver, ConsolidateCheckpoints()],
            "enable_checkpointing": True,
        }
        runner, net = trainer(LockstepDeepSpeedStrategy(stage=stage), max_epochs=2, **options), Net()
        runner.fit(net, loader(), loader())
        (tested,) = runner.test(net, loader(), ckpt_path="best", verbose=False)
        predicted: Any = runner.predict(net, loader(), ckpt_path="last")
        resumed = Net()
        again = trainer(LockstepDeepSpeedStrategy(stage=stage), max_epochs=3)
        again.fit(resumed, loader(), ckpt_path=saver.last_model_path)
        from_plain = Net()
        plain = trainer(LockstepDeepSpeedStrategy(stage=stage), max_epochs=3)
        plain.fit(from_plain, loader(), ckpt_path=f"{folder}/{stage}/last.consolidated.ckpt")
        (of_plain,) = plain.validate(
            from_plain, loader(), ckpt_path=f"{folder}/{stage}/last.consolidated.ckpt", verbose=False
        )
        found[stage] = {
            "best": saver.best_model_score.item() if saver.best_model_score is not None else None,
            "tested": tested["val_loss"],
            "predicted": predicted[0].float().tolist(),
            "resumed": resumed.losses,
            "step": again.global_step,
            "of plain": of_plain["val_loss"],
            "first of plain": from_plain.losses[0],
        }
    straight = Net()
    trainer(LockstepDDPStrategy(), max_epochs=3).fit(straight, loader())
    found["straight"] = straight.losses
    return found


def test_checkpoints_of_stages_2_and_3(device: str, tmp_path: Path) -> None:
    check_checkpoints(tmp_path, 2, 3)


def check_checkpoints(tmp_path: Path, *stages: int) -> None:
    ranks, backend = RANKS[chosen_device()]
    epoch = 8 // ranks
    found = run_ranks(ranks, checkpoints, str(tmp_path), stages, backend=backend, timeout=300)
    for of_rank in found:
        straight = of_rank["straight"]
        for stage in stages:
            one = of_rank[stage]
            assert one["tested"] == pytest.approx(one["best"], abs=1e-6), stage
            assert one["of plain"] == pytest.approx(one["best"], abs=1e-6), stage
            # It goes on with the state of the optimizer and of the scheduler, as one fit of three epochs.
            assert one["resumed"] == pytest.approx(straight[2 * epoch :], abs=2e-6), stage
            assert one["step"] == 3 * epoch
            assert one["first of plain"] == pytest.approx(straight[2 * epoch], abs=2e-6), stage
    for stage in stages:
        weights = torch.load(tmp_path / str(stage) / "last.consolidated.ckpt", weights_only=True)["state_dict"]
        net = Net()
        net.load_state_dict(weights)
        net.eval()
        first = next(iter(DataLoader(loader().dataset, 8, sampler=range(0, 64, ranks))))[0]
        assert torch.allclose(net(first), torch.tensor(found[0][stage]["predicted"]), atol=1e-6), stage
        assert not list((tmp_path / str(stage)).glob("*.writing")) + list((tmp_path / str(stage)).glob("*.before"))


# -- what is refused -----------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    def text(**options: Any) -> str:
        strategy = options.pop("strategy", {})
        try:
            trainer(LockstepDeepSpeedStrategy(**strategy), **options).fit(Net(), loader())
        except ConfigurationError as error:
            return str(error)
        return "no error"

    return {
        "batch size": text(strategy={"config": {"train_micro_batch_size_per_gpu": 16}}),
        "accumulation": text(strategy={"config": {"gradient_accumulation_steps": 4}}, accumulate_grad_batches=2),
        "offload": text(strategy={"stage": 2, "offload_param": "cpu"}),
    }


def test_what_contradicts_or_cannot_be_is_said_by_name(found: Found) -> None:
    one, other = found["refused"]
    assert one == other
    for name, words in {
        "batch size": ("train_micro_batch_size_per_gpu", "16", "8"),
        "accumulation": ("gradient_accumulation_steps", "4", "accumulate_grad_batches", "2"),
        "offload": ("zero_optimization.offload_param.device='cpu'", "expected stage 3", "adapt=True"),
    }.items():
        for word in words:
            assert word in one[name], (name, one[name])


# -- One group of ranks for what is quick --

Found = dict[str, tuple[Any, Any]]


def quick() -> dict[str, Any]:
    return {
        "refused": refusals(),
        "bf16": half_curves(),
    }


@pytest.fixture(scope="module")
def found() -> Found:
    """What came of each, by rank."""
    one, other = run_ranks(2, quick, timeout=240)
    return {name: (one[name], other[name]) for name in one}


# -- scripts as users start them -----------------------------------------------------------------------

SCRIPT = MODELS / "strategies" / "fit_script.py"


@pytest.mark.mpi
def test_over_mpi4py_the_strategy_starts_mpirun() -> None:
    outcome = run_script([str(SCRIPT), "none", "deepspeed_mpi"], env=mpi_environ(), timeout=180.0)
    assert outcome.returncode == 0, outcome.output
    values = [line.split()[-1] for line in outcome.stdout.splitlines() if "fitted" in line]
    assert len(values) == 2 and len(set(values)) == 1
