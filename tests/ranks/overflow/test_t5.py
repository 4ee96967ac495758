"""A tiny T5 whose float16 overflows: compared with Transformers' detector, on two ranks, and with the remedy."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from torch.utils.data import DataLoader

from lightning_lockstep import ConfigurationError, FP32Modules, OverflowDetectedError, OverflowDetector
from tests.common.overflow.models import Task, data, fit
from tests.helpers import chosen_device, run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def example() -> Any:
    """Return the example as a module."""
    path = Path(__file__).parents[3] / "examples" / "overflow_t5.py"
    spec = importlib.util.spec_from_file_location("overflow_t5", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plugin(precision: str) -> Any:
    """The precision plugin; Lightning itself would turn float16 on the CPU into bfloat16."""
    if precision.endswith("-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    return MixedPrecision(precision, device=chosen_device())  # type: ignore[arg-type]


def transformers_frames(task: Any, batch: torch.Tensor, *, precision: str) -> str:
    """What Transformers' detector prints when it sees the same batch with the same weights."""
    from transformers.debug_utils import DebugUnderflowOverflow

    detector = DebugUnderflowOverflow(task.model, max_frames_to_save=6)
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        plugin(precision).forward_context(),
        contextlib.suppress(ValueError),
    ):
        task.training_step(batch, 0)
    del detector
    return printed.getvalue()


#: Weights of the first feed-forward block that are too large for the format, as the example explains.
SCALES = {"16-mixed": 11_000.0, "16-true": 11_000.0, "bf16-mixed": 5.7e37, "bf16-true": 5.7e37}


def task(t5: Any, precision: str = "16-mixed") -> Any:
    torch.manual_seed(1)
    model = t5.T5Task(SCALES[precision])
    # AdamW's eps is zero in float16, which makes float16 weights nan in the first step.
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=1e-6)
    return model


def one_batch(batch: torch.Tensor) -> DataLoader[Any]:
    return DataLoader([batch], batch_size=None)  # type: ignore[arg-type]


def lines_of(text: str) -> list[str]:
    """Return the frames' lines without what only one of the two prints."""
    kept = [line.split("#")[0].replace("model.", "").strip() for line in text.splitlines()]
    start = kept.index("abs min  abs max  metadata")
    end = kept.index("", start)
    return kept[start:end]


@pytest.mark.parametrize("precision", SCALES)
def test_same_first_bad_module_and_same_values_as_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    t5 = example()
    model, detector = task(t5, precision), OverflowDetector(max_frames_to_save=6)
    bad = list(t5.batches(rank=0, bad_rank=0))[3]
    with pytest.raises(OverflowDetectedError, match="batch_number=0"):
        fit(model, one_batch(bad), detector, plugins=[plugin(precision)], default_root_dir=tmp_path)
    ours = lines_of(capsys.readouterr().err)
    theirs = lines_of(transformers_frames(model, bad, precision=precision))
    assert ours == theirs
    assert ours[-4].split() == ["encoder.block.0.layer.1.DenseReluDense.wi", "Linear"]
    assert ours[-1].split()[1:] == ["inf", "output"]
    assert detector.reports[0].producer.module == "model.encoder.block.0.layer.1.DenseReluDense.wi"


def both_detectors(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """On two ranks, the bad batch on rank 1: this rank's frames, and Transformers' of the same batch."""
    t5, rank = example(), int(os.environ["RANK"])
    bad = list(t5.batches(rank=rank, bad_rank=1))[3]
    answers = {}
    for precision in ("16-mixed", "bf16-mixed"):
        model, detector = task(t5, precision), OverflowDetector(max_frames_to_save=6)
        with contextlib.suppress(OverflowDetectedError):
            fit(
                model,
                one_batch(bad),
                detector,
                devices=2,
                strategy="ddp_find_unused_parameters_true",
                plugins=[plugin(precision)],
                default_root_dir=folder,
            )
        text = f"{detector.reports[0].text()}\n"
        theirs = transformers_frames(model, bad, precision=precision) if rank == 1 else ""
        answers[precision] = (lines_of(text), lines_of(theirs)) if rank == 1 else ([], [])
    return answers


def test_two_ranks_find_what_transformers_finds(tmp_path: Path) -> None:
    _, one = run_ranks(2, both_detectors, str(tmp_path), timeout=150)
    assert set(one) == {"16-mixed", "bf16-mixed"}
    for ours, theirs in one.values():
        assert ours == theirs
        assert ours[-4].split() == ["encoder.block.0.layer.1.DenseReluDense.wi", "Linear"]
        assert ours[-1].split()[1:] == ["inf", "output"]


def test_the_remedy_lets_the_failing_run_pass(tmp_path: Path, device: str) -> None:
    t5 = example()
    loader = t5.batches(rank=0, bad_rank=0)
    detector = OverflowDetector()
    with pytest.raises(OverflowDetectedError) as caught:
        fit(task(t5), loader, detector, plugins=[plugin("16-mixed")], default_root_dir=tmp_path)
    remedy = detector.reports[0].remedy
    assert remedy.tried
    assert remedy.modules == ("model.encoder.block.0.layer.1.DenseReluDense",)
    assert "'callbacks.fp32_modules.modules=[model.encoder.block.0.layer.1.DenseReluDense]'" in str(
        caught.value
    )
    model = task(t5)
    keys = list(model.state_dict())
    trainer = fit(
        model,
        loader,
        OverflowDetector(),
        FP32Modules(remedy.modules),
        plugins=[plugin("16-mixed")],
        default_root_dir=tmp_path,
    )
    assert trainer.global_step == 6
    assert list(model.state_dict()) == keys
    assert not any("forward" in module.__dict__ for module in model.modules())


def both_runs(folder: str) -> dict[str, Any]:
    """On two ranks: the run that fails on rank 1, and the same with the remedy."""
    t5, rank = example(), int(os.environ["RANK"])
    options: dict[str, Any] = {
        "devices": 2,
        "strategy": "ddp_find_unused_parameters_true",
        "default_root_dir": folder,
    }
    error = ""
    detector = OverflowDetector()
    try:
        fit(task(t5), t5.batches(rank=rank, bad_rank=1), detector, plugins=[plugin("16-mixed")], **options)
    except OverflowDetectedError as caught:
        error = str(caught)
    model = task(t5)
    remedy = FP32Modules(["model.encoder.block.0.layer.1.DenseReluDense"])
    loader = t5.batches(rank=rank, bad_rank=1)
    trainer = fit(model, loader, OverflowDetector(), remedy, plugins=[plugin("16-mixed")], **options)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "error": error,
        "steps": trainer.global_step,
        "sum": float(weights.double().sum()),
        "frames": [frame.text() for frame in detector.reports[0].frames],
    }


def test_two_ranks(tmp_path: Path) -> None:
    zero, one = run_ranks(2, both_runs, str(tmp_path), timeout=150)
    assert zero["error"] == one["error"]
    assert "rank 1 (host" in zero["error"]
    assert "DenseReluDense.wi (Linear) made it from good inputs" in zero["error"]
    assert "inf output" in one["frames"][-1]
    assert zero["steps"] == one["steps"] == 6
    assert zero["sum"] == one["sum"]


def test_names_that_fit_nothing_are_named_all_at_once() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"modules='befor': expected the name of a module of Task.* Did you mean 'before'\?",
    ) as caught:
        fit(Task(), data(batches=1), FP32Modules(["befor", "head", "tail.*"]))
    assert len(caught.value.faults) == 2
    with pytest.raises(ConfigurationError, match="expected a list of module names"):
        FP32Modules("head")
