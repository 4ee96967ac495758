"""The callbacks that stop and log, on virtual XLA devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    check_breakpoint,
    get_logger,
    set_breakpoint,
)
from lightning_lockstep.batch_size.memory import is_out_of_memory
from tests.sites.xla.counters import Counts
from tests.sites.xla.digits import CLOSE, Classifier, fitted, loaders, spmd, trainer


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

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask
        self.batches = 0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.batches += 1
        if self.global_step == 2:
            self.ask()
        return super().training_step(batch, batch_idx)


def test_a_breakpoint_ends_the_fit_after_the_batch(tmp_path: Path) -> None:
    module = Asks(lambda: set_breakpoint("enough"))
    made, _ = fitted(tmp_path, spmd(), module=module, callbacks=[StopTogether()])
    assert made.global_step == module.batches == 3
    decision = check_breakpoint()
    assert decision is not None and "enough" in decision.reason


def test_a_signal_saves_and_a_resumed_run_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    _, whole = fitted(tmp_path, spmd())
    torch.manual_seed(1)
    module = Asks(lambda: os.kill(os.getpid(), signal.SIGTERM))
    made, begun = fitted(tmp_path, spmd(), module=module, callbacks=[StopTogether(exit_code=None)])
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


def test_what_torch_xla_says_where_memory_runs_out() -> None:
    """In a fresh process with a limit of its own, since memory of virtual devices is that of the host."""
    program = (
        "import resource, psutil, torch, torch_xla\n"
        "weights = torch.ones(64, 1000).to(torch_xla.device())\n"
        "rows = torch.ones(100_000, 64)\n"
        "(weights + 1).cpu()\n"
        "limit = psutil.Process().memory_info().data + 400 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))\n"
        "try:\n"
        "    (rows.to(torch_xla.device()) @ weights).exp().cpu()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    virtual = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | virtual)
    said = done.stdout.strip()
    assert said and is_out_of_memory(RuntimeError(said)), (said, done.stderr)
    assert is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm."))
