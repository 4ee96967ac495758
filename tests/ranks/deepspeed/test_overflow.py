"""OverflowDetector under real DeepSpeed on two CPU ranks: a step goes bad on one, and all act alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import (
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
    OverflowDetectedError,
    OverflowDetector,
)
from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep.deepspeed.importing import import_deepspeed
from tests.harness import run_ranks
from tests.models.overflow.models import MARK, WIDTH, BadBackward, Explode, Task, data, fit

NOBODY: dict[int, int] = {}


class Net(Task):
    """With dropout, so that a replay needs the random state, and parameters that two ranks cannot divide evenly."""

    def __init__(self, suspect: nn.Module | None = None) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), suspect or nn.Identity(), nn.Dropout(0.2)))
        self.shift = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            self.suspect[0].weight.copy_(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.shift
        return out

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class InLastBias(Net):
    """A nan only in the gradient of the last bias, which is in the part of one rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch.clamp(max=1.0), batch_idx)
        marked = bool((batch > MARK / 2).any())
        nothing: Tensor = _NanInBackward.apply(self.shift if marked else self.shift.detach())
        return loss + nothing


class _NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum() * 0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.reshape(1) * float("nan")


class Manual(Net):
    """Two backwards for an optimizer step."""

    def __init__(self, suspect: nn.Module | None = None) -> None:
        super().__init__(suspect)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self(batch).square().mean())
        optimizer.step()


class Weights(Callback):
    """Keeps the weights that the engine has at the end, and before the error."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.counters: list[int] = []

    def keep(self, trainer: Trainer, module: LightningModule) -> None:
        import deepspeed

        engine: Any = trainer.model
        if not hasattr(engine, "micro_steps"):
            self.values = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
            return
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            self.values = torch.cat([p.detach().float().flatten() for p in module.parameters()]).tolist()
        self.counters = [engine.global_steps, engine.skipped_steps, engine.micro_steps]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.keep(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.keep(trainer, pl_module)


MODELS: dict[str, Callable[[], Task]] = {
    "explode": lambda: Net(Explode()),
    "backward": lambda: Net(BadBackward()),
    "part": InLastBias,
    "manual": lambda: Manual(Explode()),
    "metric": lambda: _with_metric(Net()),
}


def _with_metric(net: Net) -> Net:
    net.metric_head = Explode()
    return net


def one(
    kind: str, stage: int | None, folder: str, *, marks: tuple[dict[int, int], dict[int, int]], **given: Any
) -> dict[str, Any]:
    """Run one fit on this rank."""
    rank = int(os.environ["RANK"])
    settings: dict[str, Any] | None = given.pop("settings", {})
    detector = None if settings is None else OverflowDetector(**settings)
    torch.manual_seed(3)
    weights, error, model = Weights(), "", MODELS[kind]()
    loader = data(batches=given.pop("batches", 8), marked=marks[rank], seed=rank)
    callbacks = [weights] if detector is None else [detector, weights]
    strategy = LockstepDDPStrategy() if stage is None else LockstepDeepSpeedStrategy(stage=stage)
    try:
        fit(model, loader, *callbacks, devices=2, strategy=strategy, default_root_dir=folder, **given)
    except OverflowDetectedError as caught:
        error = str(caught)
    found: dict[str, Any] = {
        "error": error,
        "losses": model.losses,
        "weights": weights.values,
        "counters": weights.counters,
    }
    if detector is not None:
        found["skipped"] = detector.skipped_steps
        found["reports"] = [(r.clean is False, r.notes) for r in detector.reports]
    return found


FP16: dict[str, Any] = {"precision": "16-mixed"}
THIRD, CLEAN = (NOBODY, {3: 1}), (NOBODY, NOBODY)
#: Model, batches that are marked on each rank, and options of the fit.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "explode": ("explode", THIRD, {}),
    "backward": ("backward", THIRD, {}),
    "part": ("part", THIRD, {}),
    "accumulate": ("backward", (NOBODY, {4: 1}), {"accumulate_grad_batches": 2}),
    "without": ("explode", CLEAN, {"settings": None}),
    "clean": ("explode", CLEAN, {}),
    "three steps": ("explode", CLEAN, {"settings": None, "limit_train_batches": 3}),
    "skip": ("explode", THIRD, {"settings": {"action": "skip"}}),
    "ddp": ("explode", THIRD, {"settings": {"action": "skip"}}),
    "warn": ("metric", THIRD, {"settings": {"action": "warn", "mode": "hooks"}}),
    "plain metric": ("metric", THIRD, {"settings": None}),
    "manual": ("manual", THIRD, {"settings": {"action": "skip"}}),
    "scaled, backward": ("backward", THIRD, FP16),
    "scaled, forward": ("explode", THIRD, FP16),
    "scaled, floor": ("backward", THIRD, {"settings": {"scale_floor": 2.0**16}, **FP16}),
    "scaled, many": ("backward", (NOBODY, dict.fromkeys(range(1, 13), 1)), {"batches": 13, **FP16}),
}
#: What is said of a step that a loss scale skips: nothing of an ordinary one.
SCALED = {
    "backward": "",
    "forward": "the forward is not finite, which no loss scale can fix",
    "floor": "gradients are not finite although the loss scale is down to 65536",
    "many": "has just skipped 10 optimizer steps",
}


def fits(stage: int, folder: str, names: list[str]) -> dict[str, Any]:
    # Torch computes in float16 on any CPU, if slowly.
    import_deepspeed("cpu").get_accelerator().is_fp16_supported = lambda: True
    found = {}
    for name in names:
        kind, marks, given = CASES[name]
        of_stage = None if name == "ddp" else stage
        found[name] = one(kind, of_stage, f"{folder}/{stage}-{name}", marks=marks, **given)
    return found


def check(stage: int, zero: dict[str, Any], other: dict[str, Any]) -> None:
    """Compare what two ranks have found, as far as it was run."""
    for name in {"explode", "backward", "part", "accumulate"} & zero.keys():
        assert zero[name]["error"] == other[name]["error"], name
        batch = 4 if name == "accumulate" else 3
        assert f"batch_number={batch} " in zero[name]["error"], (name, zero[name]["error"])
        assert [origin for origin, _ in zero[name]["reports"]] == [False], (name, zero[name]["error"])
        assert [origin for origin, _ in other[name]["reports"]] == [True], (name, other[name]["error"])
        assert other[name]["reports"][0][1] == [], "the replay gave the same loss"
    assert "suspect.1 (Explode) made it from good inputs: output" in zero["explode"]["error"]
    for name in {"backward", "accumulate"} & zero.keys():
        assert "the backward of suspect.1 (BadBackward) made it" in zero[name]["error"], zero[name]["error"]
    if "three steps" in zero:
        assert zero["explode"]["weights"] == zero["three steps"]["weights"], "raised before they changed"
    if "clean" in zero:
        assert zero["clean"]["weights"] == zero["without"]["weights"]
        assert zero["clean"]["counters"] == zero["without"]["counters"]
        assert zero["clean"]["reports"] == []
    for answer in (zero, other):
        if "skip" in zero:
            assert answer["skip"]["skipped"] == 1
            assert answer["skip"]["counters"][0] == answer["skip"]["counters"][2] == 8
            assert answer["skip"]["weights"] == pytest.approx(answer["ddp"]["weights"], abs=2e-6)
        if "manual" in zero:
            assert answer["manual"]["skipped"] == 1
        if "warn" in zero:
            # A warning, and the replay for it, change nothing.
            assert answer["warn"]["weights"] == answer["plain metric"]["weights"]
            assert len(answer["warn"]["reports"]) == 1
    for name in SCALED if "scaled, floor" in zero else ():
        said = zero[f"scaled, {name}"]["error"]
        assert said == other[f"scaled, {name}"]["error"]
        assert bool(said) == bool(SCALED[name]) and SCALED[name] in said, said
    if "skip" in zero:
        assert zero["skip"]["weights"] == other["skip"]["weights"]
        assert zero["skip"]["counters"][1] == (1 if stage else 0)


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (2, [name for name in CASES if name not in ("without", "clean", "three steps")]),
        (3, ["explode", "backward", "without", "clean", "three steps"]),
    ],
)
def test_all_ranks_act_alike(stage: int, names: list[str], tmp_path: Path) -> None:
    check(stage, *run_ranks(2, fits, stage, str(tmp_path), names, timeout=120))
