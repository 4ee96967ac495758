"""The callbacks that stop and log, on virtual XLA devices."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import (
    AutoBatchSize,
    BatchSizeError,
    RankOrderedLogging,
    StopTogether,
    SyncedEarlyStopping,
    get_logger,
)
from tests.environments.xla.counters import Counts
from tests.environments.xla.digits import CLOSE, Classifier, fitted, loaders, spmd, trainer


def test_early_stopping_on_a_metric_of_the_validation(tmp_path: Path) -> None:
    stops = [SyncedEarlyStopping("val_loss", patience=1, min_delta=0.2, verbose=True) for _ in range(2)]
    for stop, strategy in zip(stops, ("auto", spmd()), strict=True):
        fitted(tmp_path, strategy, max_epochs=20, callbacks=[stop])
    alone, divided = stops
    assert 0 < divided.stopped_epoch < 19
    assert (divided.stopped_epoch, divided.stopping_reason) == (alone.stopped_epoch, alone.stopping_reason)
    assert float(divided.best_score) == pytest.approx(float(alone.best_score), abs=CLOSE)


class Asks(Classifier):
    """Asks in its third batch for all to stop."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if self.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def test_a_signal_saves_and_a_resumed_run_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    _, whole = fitted(tmp_path, spmd())
    torch.manual_seed(1)
    made, begun = fitted(tmp_path, spmd(), module=Asks(), callbacks=[StopTogether(exit_code=None)])
    assert made.global_step == 3
    (path,) = tmp_path.rglob("preempted.ckpt")
    weights = torch.load(path, weights_only=False)["state_dict"]
    assert {value.device.type for value in weights.values()} == {"cpu"}
    resumed = Classifier()
    again = trainer(tmp_path, spmd(), callbacks=[StopTogether(exit_code=None)])
    again.fit(resumed, *loaders(), ckpt_path=path)
    losses = [*begun.losses, *(float(loss) for loss in resumed.losses)]
    assert losses == pytest.approx(whole.losses, abs=CLOSE)


class Speaks(Classifier):
    """Logs each of its batches."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        get_logger("lightning_lockstep.test_xla").warning("batch %d", batch_idx, in_order=True)
        return super().training_step(batch, batch_idx)


def test_lines_in_order(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counts = Counts()
    callbacks = [RankOrderedLogging(files="json", folder=tmp_path), counts]
    fitted(tmp_path, spmd(), module=Speaks(), max_epochs=1, limit_val_batches=0, callbacks=callbacks)
    printed = [line for line in capfd.readouterr().err.splitlines() if "test_xla" in line]
    assert [line[-1] for line in printed] == list("01234"), printed
    assert counts.reads_by_batch() == {}
    assert len(list(tmp_path.glob("*.jsonl")) + list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize("options", [{}, {"mode": "off", "on_oom": "split"}])
def test_no_batch_size_is_tried(tmp_path: Path, options: dict[str, Any]) -> None:
    words = "no batch size can be tried with LockstepXLASPMDStrategy: it compiles and runs operations later"
    with pytest.raises(BatchSizeError, match=words):
        fitted(tmp_path, spmd(), callbacks=[AutoBatchSize(**options)])
