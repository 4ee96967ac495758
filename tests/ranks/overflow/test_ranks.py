"""OverflowDetector on two real ranks: all act alike, on whichever rank the bad value originated."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_lockstep import (
    LockstepDDPStrategy,
    OverflowDetectedError,
    OverflowDetector,
)
from tests.common.overflow.models import WIDTH, BadBackward, Explode, Task, TwoOptimizers, data, fit
from tests.helpers import run_ranks

#: Settings and the marks by batch, of rank 0 and of rank 1.
Marks = tuple[dict[int, int], dict[int, int]]


def fits(cases: dict[str, tuple[str, Marks, dict[str, Any], dict[str, Any]]], folder: str) -> dict[str, Any]:
    """Run each case on this rank, one after another in the same process group."""
    rank = int(os.environ["RANK"])
    answers: dict[str, Any] = {}
    for name, (kind, marks, settings, options) in cases.items():
        model = MODELS[kind]()
        detector = OverflowDetector(**settings)
        error = ""
        name_of_strategy = options.get("strategy", "ddp")
        strategy = STRATEGIES.get(name_of_strategy, name_of_strategy)
        loader = data(batches=20, marked=marks[rank], seed=rank)
        try:
            trainer = fit(
                model,
                loader,
                detector,
                devices=2,
                strategy=strategy() if callable(strategy) else strategy,
                default_root_dir=f"{folder}/{name}",
                **{key: value for key, value in options.items() if key != "strategy"},
            )
            steps = trainer.global_step
        except OverflowDetectedError as caught:
            error, steps = str(caught), -1
        answers[name] = {
            "error": error,
            "steps": steps,
            "skipped": detector.skipped_steps,
            "reports": [(r.is_origin, r.producer and r.producer.module, r.notes) for r in detector.reports],
            "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
            "buffers": [int(b) for n, b in model.named_buffers() if n.endswith("num_batches_tracked")],
        }
    return answers


class InfiniteLoss(Task):
    """A loss that is infinite while each gradient is finite, but for the detector's hook."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch.clamp(max=1.0), batch_idx)
        return loss + (float("inf") if bool((batch > 50).any()) else 0.0)


MODELS: dict[str, Any] = {
    "explode": lambda: Task(
        nn.Sequential(nn.Tanhshrink(), Explode(), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH))
    ),
    "backward": lambda: Task(nn.Sequential(nn.Tanhshrink(), BadBackward())),
    "metric": lambda: Task(metric=True),
    "loss": InfiniteLoss,
    "two": lambda: TwoOptimizers(nn.Sequential(nn.Tanhshrink(), Explode())),
}
STRATEGIES: dict[Any, Any] = {
    "ours": LockstepDDPStrategy,
    "ours, copied": lambda: LockstepDDPStrategy(gradient_as_bucket_view=False),
    "ours, bf16": lambda: LockstepDDPStrategy(ddp_comm_hook="bf16_compress"),
    "ours, fp16": lambda: LockstepDDPStrategy(ddp_comm_hook="fp16_compress"),
}
NOBODY: dict[int, int] = {}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """All the fits below in one process group; the second item is the folder they wrote to."""
    folder = tmp_path_factory.mktemp("ranks")
    three = {2: 0, 3: 0, 11: 1}
    cases = {
        "rank 1 only": ("explode", (NOBODY, {7: 2}), {}, {}),
        "backward only": ("backward", (NOBODY, {5: 0}), {}, {}),
        "loss only": ("loss", (NOBODY, {4: 0}), {}, {}),
        "metric head": ("metric", (NOBODY, {6: 0}), {"mode": "hooks"}, {}),
        "metric head, warn": ("metric", (NOBODY, {6: 0}), {"mode": "hooks", "action": "warn"}, {}),
        "skip": ("explode", ({11: 2}, three), {"action": "skip"}, {}),
        "clean": ("explode", (NOBODY, NOBODY), {}, {}),
        "accumulate": ("explode", (NOBODY, {9: 1}), {}, {"accumulate_grad_batches": 4}),
        "two optimizers": ("two", (NOBODY, {3: 0}), {}, {"strategy": "ddp_find_unused_parameters_true"}),
        "loss alone": ("explode", (NOBODY, {3: 0}), {"gradients": False}, {}),
        "ours": ("explode", (NOBODY, {7: 2}), {}, {"strategy": "ours"}),
        "ours, copied": ("explode", (NOBODY, {7: 2}), {}, {"strategy": "ours, copied"}),
        "ours, bf16": ("explode", (NOBODY, {7: 2}), {"mode": "hooks"}, {"strategy": "ours, bf16"}),
        "ours, skip": ("explode", ({11: 2}, three), {"action": "skip"}, {"strategy": "ours, fp16"}),
        "trace": ("explode", (NOBODY, {3: 0}), {"trace_batch_nums": [1]}, {}),
    }
    return run_ranks(2, fits, cases, str(folder), timeout=150), folder


def both(answers: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the two ranks answered for a case."""
    (zero, one), _ = answers
    return zero[name], one[name]


@pytest.mark.parametrize(
    ("name", "batch", "who"),
    [
        ("rank 1 only", 7, "suspect.1 (Explode) made it from good inputs: output"),
        ("backward only", 5, "the backward of suspect.1 (BadBackward) made it from good gradients"),
        ("metric head", 6, "metric_head (Explode) made it from good inputs"),
        ("accumulate", 9, "suspect.1 (Explode) made it from good inputs"),
        ("two optimizers", 3, "suspect.1 (Explode) made it from good inputs"),
        ("loss alone", 3, "suspect.1 (Explode) made it from good inputs"),
        ("ours", 7, "suspect.1 (Explode) made it from good inputs"),
        ("ours, copied", 7, "suspect.1 (Explode) made it from good inputs"),
        ("ours, bf16", 7, "suspect.1 (Explode) made it from good inputs"),
        ("trace", 3, "suspect.1 (Explode) made it from good inputs"),
    ],
)
def test_both_ranks_raise_the_same_error_and_name_rank_1(
    answers: Any, name: str, batch: int, who: str
) -> None:
    zero, one = both(answers, name)
    assert zero["error"] == one["error"]
    assert "rank 0 (host" in zero["error"]
    assert "clean; the bad value did not originate here" in zero["error"]
    line = next(line for line in zero["error"].splitlines() if line.startswith("rank 1"))
    assert who in line
    assert [is_origin for is_origin, *_ in zero["reports"]] == [False]
    assert [is_origin for is_origin, *_ in one["reports"]] == [True]
    assert f"batch_number={batch} " in zero["error"]
    assert one["reports"][0][2] == [], "the replay gave the same loss"


def test_a_bad_loss_whose_gradients_are_fine_reaches_the_other_rank(answers: Any) -> None:
    zero, one = both(answers, "loss only")
    assert zero["error"] == one["error"]
    assert "batch_number=4" in zero["error"]
    assert [report[0] for answer in (zero, one) for report in answer["reports"]] == [False, True]


def test_what_one_rank_alone_knows_holds_nobody_up(answers: Any) -> None:
    zero, one = both(answers, "metric head, warn")
    assert zero["steps"] == one["steps"] == 20
    assert zero["weights"] == one["weights"]
    assert zero["reports"] == []
    assert one["reports"][0][1] == "metric_head"
    text = (answers[1] / "metric head, warn" / "overflow" / "batch-6-rank-1.txt").read_text()
    assert "seen on this rank only" in text
    assert "Producer: metric_head (Explode)" in text


@pytest.mark.parametrize("name", ["skip", "ours, skip"])
def test_skip_keeps_the_weights_equal(answers: Any, name: str) -> None:
    zero, one = both(answers, name)
    assert zero["steps"] == one["steps"] == 20
    assert zero["skipped"] == one["skipped"] == 3
    assert zero["weights"] == one["weights"]
    assert all(weight == weight for weight in zero["weights"])
    assert zero["buffers"] == one["buffers"] == [20]


def test_a_clean_run_has_no_report(answers: Any) -> None:
    zero, one = both(answers, "clean")
    assert (zero["reports"], one["reports"]) == ([], [])
    assert zero["weights"] == one["weights"]


def test_the_report_is_written_once_in_rank_order(answers: Any) -> None:
    folder = answers[1] / "rank 1 only" / "overflow"
    assert sorted(path.name for path in folder.iterdir()) == ["batch-7.json", "batch-7.txt"]
    text = (folder / "batch-7.txt").read_text()
    assert text.index("--- rank 0") < text.index("--- rank 1")
    assert text.count("Detected inf/nan during batch_number=7") == 1
    trace = (answers[1] / "trace" / "overflow" / "trace-batch-1.txt").read_text()
    assert trace.index("(rank 0,") < trace.index("(rank 1,")
    assert Path(folder).exists()
