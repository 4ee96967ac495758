"""Steps between two reads, memory, what the hooks see, reports that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import (
    ConfigurationError,
    OverflowDetectedError,
    OverflowDetector,
)
from tests.models.overflow.models import MARK, WIDTH, Explode, Task, data, fit


@pytest.mark.parametrize(("bad", "note"), [(5, "Found 2 batches later"), (8, ""), (7, "")])
def test_steps_between_two_reads_are_not_lost(tmp_path: Path, bad: int, note: str) -> None:
    detector = OverflowDetector(mode="hooks", check_every_n_steps=4)
    with pytest.raises(OverflowDetectedError, match=f"batch_number={bad} ") as caught:
        fit(Task(metric=True), data(batches=10, marked={bad: 1}), detector, default_root_dir=tmp_path)
    assert "metric_head (Explode) made it from good inputs" in str(caught.value)
    assert note in " ".join(detector.reports[0].notes)


def test_a_warning_comes_for_the_first_step_of_those_read_together(tmp_path: Path) -> None:
    detector = OverflowDetector(mode="hooks", check_every_n_steps=4, action="warn")
    trainer = fit(Task(metric=True), data(batches=10, marked={1: 0, 2: 0, 9: 3}), detector, default_root_dir=tmp_path)
    assert trainer.global_step == 10
    assert [report.occasion.batch_number for report in detector.reports] == [1, 9]
    with pytest.raises(ConfigurationError, match="cannot be combined with action='skip'"):
        OverflowDetector(mode="hooks", check_every_n_steps=4, action="skip")


def test_hooks_see_micro_batches_whose_gradients_are_fine(tmp_path: Path) -> None:
    detector = OverflowDetector(mode="hooks")
    with pytest.raises(OverflowDetectedError, match="batch_number=5 "):
        fit(
            Task(metric=True),
            data(batches=12, marked={5: 1}),
            detector,
            default_root_dir=tmp_path,
            accumulate_grad_batches=4,
        )
    assert detector.reports[0].occasion.step == 1


class _InPlace(nn.Module):
    """Makes minus infinity of marked values, which the next module changes to zero in place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > MARK / 2, x * -1e38, x)


def test_hooks_see_what_an_operation_in_place_hides(tmp_path: Path) -> None:
    model = Task(nn.Sequential(nn.Linear(WIDTH, WIDTH), _InPlace(), nn.ReLU(inplace=True)))
    with torch.no_grad():
        model.suspect[0].weight.copy_(torch.eye(WIDTH))
    detector = OverflowDetector(mode="hooks")
    with pytest.raises(OverflowDetectedError, match="batch_number=3 ") as caught:
        fit(model, data(batches=5, marked={3: 2}), detector, default_root_dir=tmp_path)
    assert "suspect.1 (_InPlace) made it from good inputs" in str(caught.value)


def test_large_finite_values_are_no_alarm(tmp_path: Path) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0 + 3e38) * 1.0

    class Aside(Task):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.metric_head(self.before(batch))
            return self(batch).square().mean()

    model = Aside()
    model.metric_head = Large()
    trainer = fit(model, data(batches=3), OverflowDetector(mode="hooks"), default_root_dir=tmp_path)
    assert trainer.global_step == 3


def test_a_report_that_cannot_be_written_does_not_part_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    detector = OverflowDetector(action="skip", report_dir=tmp_path / "file" / "below")
    trainer = fit(Task(Explode()), data(batches=3, marked={1: 0}), detector, default_root_dir=tmp_path)
    assert (trainer.global_step, detector.skipped_steps) == (3, 1)
    assert f"batch-1.txt could not be written to {tmp_path / 'file' / 'below'}:" in capsys.readouterr().err
