"""StaticShapes beside torch-xla's own counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_lockstep import StaticShapes
from tests.environments.xla.digits import Classifier, fitted, numbers, spmd


class Wider(Classifier):
    """Of a size of its own: what another test of this process has compiled is not compiled again."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 93), torch.nn.ReLU(), torch.nn.Linear(93, 12))


def test_a_smaller_last_batch_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shapes = StaticShapes()
    fitted(tmp_path, spmd(), module=Wider(), max_epochs=3, num_sanity_val_steps=0, callbacks=[shapes])
    late = [one for one in shapes.late if one.stage == "training"]
    # Batch 4 has 44 samples; the first batch after an epoch meets values that the end of it has left.
    assert late[0].batch_idx == 4 and late[0].shapes == ((44, 64), (44,))
    assert late[0].before == ((64, 64), (64,)) and late[0].seconds > 0
    assert [one for one in late if one.step > 7] == [], [one.line() for one in late]
    lines = [record.getMessage() for record in caplog.records if "StaticShapes" in record.getMessage()]
    assert any("its shapes are (44, 64), (44,), those of the batch before (64, 64), (64,)" in line for line in lines)


def test_padded_batches_compile_nothing_new_and_give_the_same_losses(tmp_path: Path) -> None:
    class Asks(Wider):
        def _step(self, batch: list[torch.Tensor], stage: str) -> torch.Tensor:
            rows, labels = batch
            losses = torch.nn.functional.cross_entropy(self.net(rows), labels, reduction="none")
            self.shapes.add((stage, len(rows)))
            loss = StaticShapes.mean(losses, batch)
            self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True)
            return loss

        def __init__(self) -> None:
            torch.manual_seed(2)
            super().__init__()
            self.shapes: set[tuple[str, int]] = set()

    ragged, expected = fitted(tmp_path, spmd(), module=Asks(), max_epochs=3)
    shapes = StaticShapes(batch_size="train")
    padded, found = fitted(tmp_path, spmd(), module=Asks(), max_epochs=3, callbacks=[shapes])
    assert expected.shapes == {("train", 64), ("train", 44), ("val", 64), ("val", 36)}
    assert found.shapes == {("train", 64), ("val", 64)}
    assert [one for one in shapes.late if one.shapes != one.before] == []
    assert [one for one in shapes.late if one.step > 7] == [], [one.line() for one in shapes.late]
    assert found.losses == pytest.approx(expected.losses, abs=1e-5)
    assert numbers(padded.callback_metrics) == pytest.approx(numbers(ragged.callback_metrics), abs=1e-5)
