"""A tiny T5 whose float16 overflows on rank 1 of two: as Transformers' detector sees it, and with the remedy."""

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
from tests.harness import chosen_device, run_ranks
from tests.models.overflow.models import Task, data, fit

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

    detector = DebugUnderflowOverflow(task.to(chosen_device()).model, max_frames_to_save=6)
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        plugin(precision).forward_context(),
        contextlib.suppress(ValueError),
    ):
        task.training_step(batch.to(chosen_device()), 0)
    del detector
    return printed.getvalue()


TWO_RANKS: dict[str, Any] = {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}
#: The module that the remedy runs in float32.
BLOCK = "model.encoder.block.0.layer.1.DenseReluDense"
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


def both_detectors(t5: Any, folder: str) -> dict[str, tuple[list[str], list[str], str]]:
    """The bad batch on rank 1: its frames, those of Transformers for the same batch, and the first bad module."""
    rank = int(os.environ["RANK"])
    bad = list(t5.batches(rank=rank, bad_rank=1))[3]
    found = {}
    for precision in SCALES:
        model, detector = task(t5, precision), OverflowDetector(max_frames_to_save=6)
        plugins = [plugin(precision)]
        with contextlib.suppress(OverflowDetectedError):
            fit(model, one_batch(bad), detector, plugins=plugins, **TWO_RANKS, default_root_dir=folder)
        if rank == 1:
            (report,) = detector.reports
            theirs = transformers_frames(model, bad, precision=precision)
            found[precision] = lines_of(f"{report.text()}\n"), lines_of(theirs), report.producer.module
    return found


def fails_and_passes(t5: Any, folder: str) -> dict[str, Any]:
    """The run that fails on rank 1, and the same with the remedy."""
    rank = int(os.environ["RANK"])
    options = {**TWO_RANKS, "plugins": [plugin("16-mixed")], "default_root_dir": folder}
    detector = OverflowDetector()
    with pytest.raises(OverflowDetectedError) as caught:
        fit(task(t5), t5.batches(rank=rank, bad_rank=1), detector, **options)
    model = task(t5)
    keys = list(model.state_dict())
    callbacks = OverflowDetector(), FP32Modules([BLOCK])
    trainer = fit(model, t5.batches(rank=rank, bad_rank=1), *callbacks, **options)
    assert list(model.state_dict()) == keys
    # Lightning itself leaves one on the LightningModule.
    assert not any("forward" in module.__dict__ for module in model.model.modules())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    (report,) = detector.reports
    return {
        "error": str(caught.value),
        "steps": trainer.global_step,
        "sum": float(weights.double().sum()),
        "frames": [frame.text() for frame in report.frames],
        "remedy": (report.remedy.tried, report.remedy.modules) if report.remedy else None,
    }


def both_of(folder: str) -> dict[str, Any]:
    t5 = example()
    return {"frames": both_detectors(t5, folder), "run": fails_and_passes(t5, folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, device: str) -> list[dict[str, Any]]:
    return run_ranks(2, both_of, str(tmp_path_factory.mktemp("t5")), timeout=150)


@pytest.mark.parametrize("precision", SCALES)
def test_same_first_bad_module_and_same_values_as_transformers(found: list[dict[str, Any]], precision: str) -> None:
    ours, theirs, module = found[1]["frames"][precision]
    assert ours == theirs
    assert ours[-4].split() == ["encoder.block.0.layer.1.DenseReluDense.wi", "Linear"]
    assert ours[-1].split()[1:] == ["inf", "output"]
    assert module == f"{BLOCK}.wi"


def test_both_ranks_raise_the_same_error_with_the_remedy(found: list[dict[str, Any]]) -> None:
    zero, one = (each["run"] for each in found)
    assert zero["error"] == one["error"]
    assert "rank 1 (host" in zero["error"]
    assert "DenseReluDense.wi (Linear) made it from good inputs" in zero["error"]
    assert f"'callbacks.fp32_modules.modules=[{BLOCK}]'" in zero["error"]
    assert "inf output" in one["frames"][-1] and one["remedy"] == (True, (BLOCK,))


def test_the_remedy_lets_the_failing_run_pass(found: list[dict[str, Any]]) -> None:
    zero, one = (each["run"] for each in found)
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
