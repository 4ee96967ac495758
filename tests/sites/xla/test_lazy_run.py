"""Values are read from XLA devices where they are logged only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.xla import steps as lazy_run
from tests.sites.xla.counters import compilations, device_reads
from tests.sites.xla.digits import Classifier, fitted, spmd


class Shows(Classifier):
    """Shows its loss in the progress bar, and counts how often the host reads from the device in training."""

    def __init__(self, width: int = 128) -> None:
        torch.manual_seed(2)
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 12)
        )
        self.reads: list[int] = []
        self.shown: list[dict[str, Any]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, *args: Any) -> None:
        self.reads.append(device_reads())
        self.shown.append(dict(self.trainer.progress_bar_metrics))


def reads_in_training(folder: Path, **options: Any) -> tuple[dict[int, int], Shows]:
    """Fit 18 steps; return how often values were read in each, but for the last steps of the epochs of five."""
    net = Shows()
    fitted(folder, spmd(), module=net, max_steps=18, max_epochs=-1, limit_val_batches=0, **options)
    steps = [now - before for before, now in zip(net.reads, net.reads[1:], strict=False)]
    return {step: count for step, count in enumerate(steps) if step % 5 != 4}, net


def test_values_of_the_progress_bar_are_read_where_they_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, net = reads_in_training(tmp_path, log_every_n_steps=8)
    # torch-xla counts a read when it is over, which may be in the step after.
    assert {step for step, count in found.items() if count} <= {7, 8, 15, 16} and sum(found.values()) >= 2, (
        found
    )
    assert "shown" not in net.shown[6] and net.shown[8]["shown"] == pytest.approx(net.losses[7])
    assert net.shown[13]["shown"] == net.shown[12]["shown"], "in between it stays"
    assert vars(net.trainer.fit_loop.epoch_loop._results).get("metrics") is None
    monkeypatch.setattr(lazy_run, "_reading", lambda results, _: results.metrics)
    each, before = reads_in_training(tmp_path, log_every_n_steps=8)
    assert min(each.values()) >= 1, "as Lightning does it, at every step"
    assert sum(each.values()) > 2 * sum(found.values())
    assert before.losses == pytest.approx(net.losses, abs=1e-5)


class CountsCompilations(Shows):
    """Counts how many graphs each step has compiled; logs one value of each step, and one of the epoch too."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.compiled: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("of_the_step", loss)
        self.log("of_the_epoch", loss, on_epoch=True)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        before = compilations()
        super().optimizer_step(*args, **kwargs)
        self.compiled.append(compilations() - before)


def test_a_new_epoch_does_not_compile_the_step_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = CountsCompilations(139)
    options = {"limit_train_batches": 4, "max_epochs": 3, "limit_val_batches": 0}
    fitted(tmp_path, spmd(), module=net, **options)
    assert len(net.compiled) == 12 and sum(net.compiled[2:]) == 0, net.compiled
    assert {
        step: vars(net.trainer.fit_loop.epoch_loop._results).get(step) for step in ("metrics", "reset")
    } == {
        "metrics": None,
        "reset": None,
    }
    # As Lightning does it, once; with a graph of its own, since torch-xla keeps those of before.
    monkeypatch.setattr(lazy_run, "_resetting", lambda results: results.reset)
    before = CountsCompilations(137)
    fitted(tmp_path, spmd(), module=before, **options)
    assert before.compiled[4] == 1 and sum(before.compiled[2:]) == 1, before.compiled


def test_an_error_leaves_no_patch_and_the_fit_says_what_takes_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(Shows):
        def on_train_batch_end(self, *args: Any) -> None:
            assert {"metrics", "reset"} <= {*vars(self.trainer.fit_loop.epoch_loop._results)}
            raise RuntimeError("of the user")

    net = Fails()
    with pytest.raises(RuntimeError, match="of the user"):
        fitted(tmp_path, spmd(), module=net)
    assert not {"metrics", "reset"} & {*vars(net.trainer.fit_loop.epoch_loop._results)}
    assert capsys.readouterr().err.count("torch-xla compiles the first two steps of a fit") == 1
