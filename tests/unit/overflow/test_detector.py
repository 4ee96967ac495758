"""OverflowDetector in one process: what produced the bad value, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_lockstep import ConfigurationError, LockstepError, OverflowDetectedError, OverflowDetector
from lightning_lockstep import detect_overflow as spot
from tests.harness import chosen_device
from tests.models.overflow.models import (
    WIDTH,
    BadBackward,
    Checkpointed,
    Explode,
    Task,
    TwoOptimizers,
    data,
    fit,
)


def find(model: Task, loader: Any, tmp_path: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Fit until the detector raises; return (detector, message)."""
    detector = OverflowDetector(**{"report_dir": None, **settings})
    with pytest.raises(OverflowDetectedError) as caught:
        fit(model, loader, detector, default_root_dir=tmp_path, **(options or {}))
    assert no_hooks(model)
    return detector, str(caught.value)


def no_hooks(model: nn.Module) -> bool:
    """Whether nothing of the detector is left on the model."""
    hooks = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    return not hooks and "training_step" not in model.__dict__ and "log" not in model.__dict__


@pytest.mark.parametrize("mode", ["replay", "hooks"])
@pytest.mark.usefixtures("device")
def test_the_module_the_batch_and_the_sample_are_named(tmp_path: Path, mode: str, capsys: Any) -> None:
    model = Task(nn.Sequential(nn.Tanhshrink(), Explode(), nn.ReLU()))
    detector, message = find(model, data(batches=6, marked={4: 2}), tmp_path, mode=mode)
    assert message.startswith("Detected inf/nan during batch_number=4 (epoch 0, batch 4, step 4)")
    assert "suspect.1 (Explode) made it from good inputs: output [float32: 1 inf, at [2]" in message
    (report,) = detector.reports
    assert report.producer.module == "suspect.1"
    assert report.frames[-1].module == "suspect.1"
    assert report.propagators[0].startswith("suspect.2 (ReLU)")
    assert not report.notes, "the replay gave the same loss"
    assert report.gradients
    printed = capsys.readouterr().err
    assert printed.count("Detected inf/nan during batch_number=4") == 1
    assert "abs min  abs max  metadata" in printed
    assert printed == (tmp_path / "overflow" / "batch-4.txt").read_text()


class BadWeight(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with torch.no_grad():
                pl_module.head.weight[0, 5] = float("nan")


@pytest.mark.usefixtures("device")
def test_a_weight_that_is_bad_already(tmp_path: Path) -> None:
    model = Task()
    detector = OverflowDetector()
    with pytest.raises(OverflowDetectedError, match=r"the weights of head \(Linear\) are bad already: weight"):
        fit(model, data(batches=4), detector, BadWeight(), default_root_dir=tmp_path)
    assert "1 nan" in detector.reports[0].producer.remarks


def test_a_batch_that_holds_nan(tmp_path: Path) -> None:
    loader = data(batches=3)
    loader.dataset[1 * 4 + 3] = float("nan")  # type: ignore[index]
    _, message = find(Task(), loader, tmp_path)
    assert "it came with the batch: batch [float32: 8 nan, at [3]" in message


def test_code_between_modules_is_told_from_modules(tmp_path: Path) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Tanhshrink(), nn.Tanhshrink()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.where(self.first(x) > 50, torch.full_like(x, float("inf")), x))

    _, message = find(Task(Outer()), data(batches=2, marked={1: 0}), tmp_path)
    assert "suspect (Outer) made it in its own forward, before it called suspect.second: input[0]" in message


def test_code_of_training_step_is_told_from_modules(tmp_path: Path) -> None:
    class Divides(Task):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(torch.where(batch > 50, torch.inf, batch), batch_idx)

    _, message = find(Divides(), data(batches=2, marked={1: 0}), tmp_path)
    assert "the LightningModule (Divides) made it in its own code, before it called its forward: input[0]" in message


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", [Explode, BadBackward])
def test_inside_a_checkpointed_block(tmp_path: Path, kind: Any, reentrant: bool) -> None:
    model = Task(Checkpointed(nn.Sequential(nn.Tanhshrink(), kind()), reentrant=reentrant))
    _, message = find(model, data(batches=3, marked={2: 0}), tmp_path)
    assert f"suspect.inner.1 ({kind.__name__}) made it" in message.replace("the backward of ", "")


def test_a_metric_head_that_never_reaches_the_loss_needs_hooks(tmp_path: Path) -> None:
    fit(Task(metric=True), data(batches=3, marked={1: 0}), OverflowDetector(), default_root_dir=tmp_path)
    _, message = find(Task(metric=True), data(batches=3, marked={1: 0}), tmp_path, mode="hooks")
    assert "batch_number=1" in message
    assert "metric_head (Explode) made it from good inputs" in message


class Compare(Callback):
    """Notes weights, buffers and random state after each batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.seen.append((state, torch.get_rng_state(), float(trainer.callback_metrics["loss"].detach())))


@pytest.mark.parametrize("settings", [{}, {"action": "skip"}, {"mode": "hooks"}, {"action": "warn"}])
@pytest.mark.usefixtures("device")
def test_a_run_without_a_hit_is_the_same_bit_for_bit(tmp_path: Path, settings: dict[str, Any]) -> None:
    def run(*callbacks: Callback) -> list[Any]:
        compare = Compare()
        model = Task(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.ReLU(inplace=True)))
        fit(model, data(batches=8), *callbacks, compare, default_root_dir=tmp_path)
        return compare.seen

    for (state, rng, loss), (other, other_rng, other_loss) in zip(
        run(), run(OverflowDetector(**settings)), strict=True
    ):
        assert all(torch.equal(state[name], other[name]) for name in state)
        assert torch.equal(rng, other_rng)
        assert loss == other_loss


@pytest.mark.usefixtures("device")
def test_skip_leaves_the_step_out_and_puts_buffers_back(tmp_path: Path) -> None:
    compare = Compare()
    norm = nn.BatchNorm1d(WIDTH)
    model = Task(nn.Sequential(Explode(), norm))
    detector = OverflowDetector(action="skip")
    trainer = fit(model, data(batches=6, marked={1: 0, 2: 0, 4: 0}), detector, compare, default_root_dir=tmp_path)
    states = [state for state, _, _ in compare.seen]
    assert detector.skipped_steps == 3
    assert len(detector.reports) == 2, "one for each row of bad steps"
    assert trainer.callback_metrics["overflow_skipped_steps"] == 3
    assert torch.equal(states[0]["head.weight"], states[1]["head.weight"])
    assert torch.equal(states[1]["head.weight"], states[2]["head.weight"])
    assert not torch.equal(states[2]["head.weight"], states[3]["head.weight"])
    assert [int(s["suspect.1.num_batches_tracked"]) for s in states] == [1, 2, 3, 4, 5, 6]
    assert detector.state_dict() == {"skipped_steps": 3, "scaler_skips": 0}


def test_skip_gives_up(tmp_path: Path) -> None:
    detector = OverflowDetector(action="skip", max_skips=3)
    with pytest.raises(OverflowDetectedError, match="3 optimizer steps in a row were skipped"):
        fit(
            Task(Explode()),
            data(batches=9, marked=dict.fromkeys(range(3, 9), 0)),
            detector,
            default_root_dir=tmp_path,
        )
    assert detector.skipped_steps == 3


def test_manual_optimization_with_two_optimizers(tmp_path: Path) -> None:
    model = TwoOptimizers(nn.Sequential(nn.Dropout(0.2), Explode()))
    detector, message = find(model, data(batches=5, marked=dict.fromkeys(range(2, 5), 0)), tmp_path)
    assert "suspect.1 (Explode) made it from good inputs" in message
    assert not detector.reports[0].notes, "the same loss again"

    model = TwoOptimizers(nn.Sequential(nn.Dropout(0.2), Explode()))
    detector = OverflowDetector(action="skip")
    trainer = fit(model, data(batches=5, marked={2: 0}), detector, default_root_dir=tmp_path)
    assert (detector.skipped_steps, trainer.global_step) == (1, 10)
    assert all(p.requires_grad and bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_module_is_replayed_uncompiled_and_hooks_mode_refuses_it(tmp_path: Path) -> None:
    model = Task(torch.compile(nn.Sequential(nn.Tanhshrink(), Explode()), backend="eager"))  # type: ignore[arg-type]
    _, message = find(model, data(batches=3, marked={2: 0}), tmp_path)
    assert "suspect.1 (Explode) made it from good inputs" in message
    with pytest.raises(ConfigurationError, match=r"compiled with torch.compile"):
        fit(model, data(batches=3), OverflowDetector(mode="hooks"), default_root_dir=tmp_path)

    class Whole(Task):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).square().mean()  # self.log cannot be traced in this Lightning

    whole = torch.compile(Whole(Explode()), backend="eager")
    with pytest.raises(OverflowDetectedError, match=r"suspect \(Explode\) made it"):
        fit(whole, data(batches=3, marked={2: 0}), OverflowDetector(), default_root_dir=tmp_path)  # type: ignore[arg-type]


def test_tracing_prints_every_frame_of_the_batches_asked_for(tmp_path: Path, capsys: Any) -> None:
    detector = OverflowDetector(trace_batch_nums=[1, 3], abort_after_batch_num=3)
    with pytest.raises(LockstepError, match="aborting after batch 3, as abort_after_batch_num=3 asks"):
        fit(Task(Explode()), data(batches=6, marked={3: 0}), detector, default_root_dir=tmp_path)
    printed = capsys.readouterr().err
    assert "*** Starting batch number=1 ***" in printed
    assert "*** Finished batch number=3 ***" in printed
    assert "batch number=2" not in printed
    assert not detector.reports, "no detection in a traced batch"
    text = (tmp_path / "overflow" / "trace-batch-1.txt").read_text()
    names = [line.split()[0] for line in text.splitlines() if line.startswith(" " * 18) and "***" not in line]
    assert names == ["before", "suspect", "head", "Task"]


def test_allowed_infinities_and_chosen_modules(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            mask = torch.zeros_like(x).masked_fill(x > 50, float("-inf"))
            return {"first": x.clamp(max=1), "states": (mask, {"last": x.clamp(max=1)})}

    loader = data(batches=3, marked={1: 0})
    fit(
        Task(Masked()),
        loader,
        OverflowDetector(mode="hooks", allow_inf=["suspect.output.states.0"]),
        default_root_dir=tmp_path,
    )
    fit(Task(Masked()), loader, OverflowDetector(mode="hooks", modules=["head"]), default_root_dir=tmp_path)
    _, message = find(Task(Masked()), loader, tmp_path, mode="hooks")
    assert "output['states'][0]" in message


def test_spots_inside_a_forward_stand_in_the_frames(tmp_path: Path) -> None:
    class Spotted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = torch.where(x > 50, x * 1e38, x)
            spot(scores, "scores")
            return scores.clamp(max=1e30)

    _, message = find(Task(nn.Sequential(Spotted(), Explode())), data(batches=2, marked={1: 0}), tmp_path)
    assert "suspect.0 (Spotted) made it, at detect_overflow: detect_overflow('scores')" in message


def amp(init_scale: float) -> MixedPrecision:
    return MixedPrecision(
        "16-mixed", chosen_device(), torch.amp.GradScaler(chosen_device(), init_scale, growth_interval=1000)
    )


@pytest.mark.usefixtures("device")
def test_ordinary_skips_of_a_loss_scaler_are_no_alarms(tmp_path: Path) -> None:
    detector = OverflowDetector()
    model = Task(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    trainer = fit(model, data(batches=30), detector, plugins=[amp(2.0**24)], default_root_dir=tmp_path)
    assert detector.scaler_skips >= 1
    assert not detector.reports
    assert trainer.precision_plugin.scaler.get_scale() < 2.0**24


@pytest.mark.usefixtures("device")
def test_a_loss_scaler_at_its_floor_is_an_alarm(tmp_path: Path) -> None:
    model = Task(nn.Sequential(nn.Tanhshrink(), BadBackward()))
    _, message = find(
        model,
        data(batches=12, marked=dict.fromkeys(range(1, 12), 0)),
        tmp_path,
        options={"plugins": [amp(16.0)]},
    )
    assert "though the loss scale is down to 1" in message
    assert "batch_number=5" in message


def test_a_bad_forward_under_a_loss_scaler_is_an_alarm_at_once(tmp_path: Path) -> None:
    _, message = find(Task(Explode()), data(batches=3, marked={1: 0}), tmp_path, options={"plugins": [amp(16.0)]})
    assert "batch_number=1" in message
    assert "the forward is not finite, which no loss scale can fix" in message


def test_the_loss_alone_where_gradients_are_not_looked_at(tmp_path: Path) -> None:
    model = Task(nn.Sequential(nn.Tanhshrink(), BadBackward()))
    fit(model, data(batches=2, marked={1: 0}), OverflowDetector(gradients=False), default_root_dir=tmp_path)
    _, message = find(Task(Explode()), data(batches=2, marked={1: 0}), tmp_path, gradients=False)
    assert "suspect (Explode)" in message


def test_an_error_of_the_user_takes_the_detector_away_too(tmp_path: Path) -> None:
    class Fails(Task):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    model = Fails()
    with pytest.raises(KeyError, match="mine"):
        fit(model, data(batches=3), OverflowDetector(mode="hooks"), default_root_dir=tmp_path)
    assert no_hooks(model)
