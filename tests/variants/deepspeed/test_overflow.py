"""OverflowDetector under real DeepSpeed on two CPU ranks: each stage of ZeRO, each way in which a step goes bad."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import (
    ConfigurationError,
    LockstepDDPStrategy,
    LockstepDeepSpeedStrategy,
    OverflowDetectedError,
    OverflowDetector,
)
from lightning_lockstep._doors.deepspeed_engines import adapter_of
from lightning_lockstep._doors.lightning import Callback, LightningModule, Trainer
from lightning_lockstep.deepspeed.engine import GradientsOfEngine
from lightning_lockstep.overflow.diagnose import Counters, Response
from lightning_lockstep.overflow.settings import OverflowSettings
from tests.common.overflow.models import MARK, WIDTH, BadBackward, Explode, Task, data, fit
from tests.helpers import run_ranks
from tests.helpers.ranks import run_ranks_raw

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

STAGES = (0, 1, 2, 3)
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


class Leaves(Net):
    """Fails when its batch is replayed on rank 1."""

    def __init__(self) -> None:
        super().__init__(Explode())
        self.seen = 0
        self.replays = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.replays and self.global_rank == 1:
            raise ValueError("not twice on this rank")
        self.replays = bool((batch > MARK / 2).any()) or batch_idx == 2
        return super().training_step(batch, batch_idx)


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
    loader = data(batches=8, marked=marks[rank], seed=rank)
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
        found["reports"] = [(r.is_origin, r.notes) for r in detector.reports]
    return found


def fits(stage: int, folder: str) -> dict[str, Any]:
    third: Any = (NOBODY, {3: 1})
    clean: Any = (NOBODY, NOBODY)
    found: dict[str, Any] = {}

    def run(name: str, kind: str, marks: Any, **given: Any) -> None:
        begun = time.monotonic()
        found[name] = one(kind, stage, f"{folder}/{stage}-{name}", marks=marks, **given)
        found[name]["took"] = time.monotonic() - begun

    run("explode", "explode", third)
    run("backward", "backward", third)
    run("part", "part", third)
    run("accumulate", "backward", (NOBODY, {4: 1}), accumulate_grad_batches=2)
    run("without", "explode", clean, settings=None)
    run("clean", "explode", clean)
    run("three steps", "explode", clean, settings=None, limit_train_batches=3)
    run("skip", "explode", third, settings={"action": "skip"})
    run("warn", "metric", third, settings={"action": "warn", "mode": "hooks"})
    run("plain metric", "metric", third, settings=None)
    found["ddp"] = one("explode", None, f"{folder}/ddp", marks=third, settings={"action": "skip"})
    run("manual", "manual", third, settings={"action": "skip"})
    run("loss alone", "explode", third, settings={"gradients": False, "trace_batch_nums": [1]})
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_act_alike(stage: int, tmp_path: Any) -> None:
    zero, other = run_ranks(2, fits, stage, str(tmp_path), timeout=200)
    for name in ("explode", "backward", "part", "accumulate", "loss alone"):
        assert zero[name]["error"] == other[name]["error"], name
        batch = 4 if name == "accumulate" else 3
        assert f"batch_number={batch} " in zero[name]["error"], (name, zero[name]["error"])
        assert [origin for origin, _ in zero[name]["reports"]] == [False], (name, zero[name]["error"])
        assert [origin for origin, _ in other[name]["reports"]] == [True], (name, other[name]["error"])
        assert other[name]["reports"][0][1] == [], "the replay gave the same loss"
    line = "suspect.1 (Explode) made it from good inputs: output"
    assert line in zero["explode"]["error"] and line in zero["loss alone"]["error"]
    for name in ("backward", "accumulate"):
        assert "the backward of suspect.1 (BadBackward) made it" in zero[name]["error"], zero[name]["error"]
    # Raised before the weights changed.
    assert zero["explode"]["weights"] == zero["three steps"]["weights"]
    assert zero["clean"]["weights"] == zero["without"]["weights"]
    assert zero["clean"]["counters"] == zero["without"]["counters"]
    assert zero["clean"]["reports"] == []
    for answer in (zero, other):
        assert answer["skip"]["skipped"] == 1
        assert answer["skip"]["counters"][0] == answer["skip"]["counters"][2] == 8
        assert answer["skip"]["weights"] == pytest.approx(answer["ddp"]["weights"], abs=2e-6)
        assert answer["manual"]["skipped"] == 1
        # A warning, and the replay for it, change nothing.
        assert answer["warn"]["weights"] == answer["plain metric"]["weights"]
        assert len(answer["warn"]["reports"]) == 1
    assert zero["skip"]["weights"] == other["skip"]["weights"]
    assert zero["skip"]["weights"] != zero["clean"]["weights"]
    assert zero["skip"]["counters"][1] == (1 if stage else 0)


class Scaled:
    """What the detector asks of an engine that trains in float16, which this machine may not have."""

    def __init__(self, scale: float, too_many: str | None = None) -> None:
        self.scale, self.too_many = scale, too_many

    def loss_scale(self) -> tuple[float, float]:
        return self.scale, 4.0

    def why_skips_are_too_many(self) -> str | None:
        return self.too_many


class Alone:
    """A publisher on the only rank."""

    def collect(self, entry: Any) -> Any:
        return SimpleNamespace(entries={0: entry})


@pytest.mark.parametrize(
    ("engine", "loss", "why"),
    [
        (Scaled(65536), 1.0, None),
        (Scaled(65536), float("inf"), "the forward is not finite"),
        (Scaled(4), 1.0, "the loss scale is down to 4"),
        (Scaled(65536, "8 steps in a row were skipped."), 1.0, "8 steps in a row were skipped"),
    ],
)
def test_an_ordinary_skip_of_a_loss_scale_is_no_alarm(engine: Any, loss: float, why: str | None) -> None:
    nothing: Any = None
    publisher: Any = Alone()
    response = Response(nothing, nothing, OverflowSettings(), nothing, publisher, nothing, Counters(), engine)
    record: Any = SimpleNamespace(loss=torch.tensor(loss), activation_flag=None)
    found = response._why_alarm(record)
    assert found is None if why is None else found is not None and why in found


def test_an_unknown_optimizer_of_deepspeed_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="where SimpleNamespace of this DeepSpeed keeps gradients"):
        GradientsOfEngine(SimpleNamespace(optimizer=SimpleNamespace()))


def leaves(folder: str) -> str:
    rank = int(os.environ["RANK"])
    loader = data(batches=4, marked={2: 1} if rank == 1 else {}, seed=rank)
    strategy = LockstepDeepSpeedStrategy(stage=3)
    fit(
        Leaves(), loader, OverflowDetector(timeout=5.0), devices=2, strategy=strategy, default_root_dir=folder
    )
    return "no error"


def test_a_rank_that_leaves_a_common_replay_ends_the_run(tmp_path: Any) -> None:
    outcomes = run_ranks_raw(2, leaves, str(tmp_path), timeout=120)
    assert not any(outcome.ok or outcome.killed_by_helper for outcome in outcomes)
    assert "not twice on this rank" in str(outcomes[1].exception)


def test_a_skipped_step_of_bf16_is_no_overflow_for_ever_where_the_optimizer_does_not_look_for_one() -> None:
    """Up to DeepSpeed 0.19.7 its optimizer of bfloat16 has no ``overflow``, and would never take it back."""

    class Optimizer:
        fp32_groups_gradients: tuple[()] = ()
        steps = 0

        def step(self) -> None:
            self.steps += 1

        def clear_hp_grads(self) -> None: ...

        def clear_lp_grads(self) -> None: ...

    engine: Any = SimpleNamespace(optimizer=Optimizer())
    GradientsOfEngine(engine).skip_step()
    engine.optimizer.step()
    assert engine.optimizer.steps == 0
    engine.optimizer.step()
    assert engine.optimizer.steps == 1
    assert adapter_of(engine).outcome() is None
