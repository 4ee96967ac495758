"""OverflowDetector on two real ranks: all act alike, on whichever rank the bad value originated."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import (
    FP32Modules,
    LockstepDDPStrategy,
    OverflowDetectedError,
    OverflowDetector,
)
from lightning_lockstep.overflow.report import ReportPublisher
from tests.harness import run_ranks
from tests.models.overflow.models import (
    WIDTH,
    BadBackward,
    Explode,
    MaskedSoftmax,
    Task,
    TwoOptimizers,
    data,
    fit,
)

#: Settings and the marks by batch, of rank 0 and of rank 1.
Marks = tuple[dict[int, int], dict[int, int]]


def fits(folder: str) -> dict[str, Any]:
    """Run each case on this rank, one after another in the same process group."""
    rank = int(os.environ["RANK"])
    answers: dict[str, Any] = {}
    write = ReportPublisher._write

    def write_slowly(*args: Any) -> None:
        time.sleep(0.2)
        write(*args)

    ReportPublisher._write = write_slowly  # type: ignore[method-assign]
    for name, (kind, marks, settings, options) in CASES.items():
        model = MODELS[kind]()
        detector = OverflowDetector(**settings)
        error, is_written = "", False
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
            is_written = Path(error.rpartition("Full report: ")[2]).is_file()
        answers[name] = {
            "error": error,
            "is_written": is_written,
            "steps": steps,
            "skipped": detector.skipped_steps,
            "text": detector.reports[0].text() if detector.reports else "",
            "reports": [(r.clean is False, r.producer and r.producer.module, r.notes) for r in detector.reports],
            "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
            "buffers": [int(b) for n, b in model.named_buffers() if n.endswith("num_batches_tracked")],
        }
    return answers


def islands() -> dict[str, Any]:
    """On two ranks under bf16-mixed: gradients with a float32 island, and of the same in one process."""
    rank = int(os.environ["RANK"])
    batches = [data(batches=1, seed=seed) for seed in (0, 1)]

    class Noted(Task):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.noted = torch.cat([p.grad.flatten() for p in self.parameters()])

    model = Noted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    plain = Noted(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    states = [plain.state_dict()]
    torch.distributed.broadcast_object_list(states, src=0)
    plain.load_state_dict(states[0])
    model.load_state_dict(states[0])
    inside: list[torch.dtype] = []
    model.suspect[1].register_forward_hook(lambda m, a, out: inside.append(a[0].dtype))
    fit(
        model,
        batches[rank],
        FP32Modules(["suspect"]),
        OverflowDetector(),
        devices=2,
        strategy="ddp",
        precision="bf16-mixed",
    )
    means = []
    for seed in (0, 1):
        loss = _with_island(plain, next(iter(batches[seed])))
        means.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(plain.parameters()))]))
    return {"inside": inside, "ddp": model.noted.tolist(), "alone": (sum(means) / 2).tolist()}


def _with_island(model: Task, batch: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model.before(batch)
        with torch.autocast("cpu", enabled=False):
            inner = model.suspect(before.float()).to(before.dtype)
        return model.head(inner).square().mean()


def everything(folder: str) -> dict[str, Any]:
    """The fits, and what else needs two ranks."""
    return {**fits(folder), "islands": islands()}


class InfiniteLoss(Task):
    """A loss that is infinite while each gradient is finite, but for the detector's hook."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch.clamp(max=1.0), batch_idx)
        return loss + (float("inf") if bool((batch > 50).any()) else 0.0)


MODELS: dict[str, Any] = {
    "explode": lambda: Task(nn.Sequential(nn.Tanhshrink(), Explode(), nn.Dropout(0.2), nn.BatchNorm1d(WIDTH))),
    "backward": lambda: Task(nn.Sequential(nn.Tanhshrink(), BadBackward())),
    "metric": lambda: Task(metric=True),
    "loss": InfiniteLoss,
    "mask": MaskedSoftmax,
    "two": lambda: TwoOptimizers(nn.Sequential(nn.Tanhshrink(), Explode())),
}
STRATEGIES: dict[Any, Any] = {
    "ours": LockstepDDPStrategy,
    "ours, fp16": lambda: LockstepDDPStrategy(ddp_comm_hook="fp16_compress"),
}
NOBODY: dict[int, int] = {}


CASES: dict[str, tuple[str, Marks, dict[str, Any], dict[str, Any]]] = {
    "rank 1 only": ("explode", (NOBODY, {7: 2}), {}, {}),
    "backward only": ("backward", (NOBODY, {5: 0}), {}, {}),
    "loss only": ("loss", (NOBODY, {4: 0}), {}, {}),
    "metric head": ("metric", (NOBODY, {6: 0}), {"mode": "hooks"}, {}),
    "metric head, warn": ("metric", (NOBODY, {6: 0}), {"mode": "hooks", "action": "warn"}, {}),
    "skip": ("explode", ({11: 2}, {2: 0, 3: 0, 11: 1}), {"action": "skip"}, {}),
    "clean": ("explode", (NOBODY, NOBODY), {}, {}),
    "accumulate": ("explode", (NOBODY, {9: 1}), {}, {"accumulate_grad_batches": 4}),
    "two optimizers": ("two", (NOBODY, {3: 0}), {}, {"strategy": "ddp_find_unused_parameters_true"}),
    "ours": ("explode", (NOBODY, {7: 2}), {}, {"strategy": "ours"}),
    "ours, skip": ("explode", ({11: 2}, {2: 0, 3: 0, 11: 1}), {"action": "skip"}, {"strategy": "ours, fp16"}),
    "meant to be infinite": ("mask", (NOBODY, NOBODY), {"mode": "hooks"}, {"strategy": "ours"}),
    "trace": ("explode", (NOBODY, {3: 0}), {"trace_batch_nums": [1]}, {}),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, device: str) -> Any:
    """All the fits in one process group; the second item is the folder they wrote to."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(2, everything, str(folder), timeout=150), folder


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
        ("ours", 7, "suspect.1 (Explode) made it from good inputs"),
        ("trace", 3, "suspect.1 (Explode) made it from good inputs"),
    ],
)
def test_both_ranks_raise_the_same_error_and_name_rank_1(answers: Any, name: str, batch: int, who: str) -> None:
    zero, one = both(answers, name)
    assert zero["error"] == one["error"]
    assert zero["is_written"] and one["is_written"], "else what rank 1 raises might end rank 0 before it has written"
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


def test_a_warning_of_what_reaches_no_gradient_is_given_by_all_ranks(answers: Any) -> None:
    zero, one = both(answers, "metric head, warn")
    assert zero["steps"] == one["steps"] == 20
    assert zero["weights"] == one["weights"]
    assert [report[0] for answer in (zero, one) for report in answer["reports"]] == [False, True]
    text = (answers[1] / "metric head, warn" / "overflow" / "batch-6.txt").read_text()
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


def test_an_output_that_is_meant_to_be_infinite_is_told_apart_on_each_rank(answers: Any) -> None:
    for rank, told in enumerate(both(answers, "meant to be infinite")):
        assert "an output of a module is not finite, although the loss is." in told["error"]
        assert "allow_inf=['mask.output']" in told["error"] and "allow_inf=['mask.output']" in told["text"]
        assert ("not shown: this detector has made" in told["text"]) == (rank == 0)


def test_gradients_of_float32_islands_under_ddp(answers: Any) -> None:
    zero, one = both(answers, "islands")
    assert zero["ddp"] == one["ddp"]
    assert zero["inside"] == [torch.float32]
    assert zero["ddp"] == pytest.approx(zero["alone"], rel=1e-5, abs=1e-7)
