"""Values are read from XLA devices where they are logged only, and compilations are announced."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.xla import steps as lazy_run
from lightning_lockstep.xla.steps import CompilationAnnouncer, CompilationWatch, where_in_run
from tests.sites.xla.counters import compilations
from tests.sites.xla.digits import Classifier, fitted, loaders, spmd, trainer


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
        self.reads.append(reads())
        self.shown.append(dict(self.trainer.progress_bar_metrics))


def reads() -> int:
    from torch_xla.debug import metrics

    return int((metrics.metric_data("TransferFromDeviceTime") or [0])[0])


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
    monkeypatch.setattr(lazy_run, "read_progress_values_when", lambda *_: lambda: None)
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
    monkeypatch.setattr(lazy_run, "keep_counts_of_step_values", lambda trainer: lambda: None)
    before = CountsCompilations(137)
    fitted(tmp_path, spmd(), module=before, **options)
    assert before.compiled[4] == 1 and sum(before.compiled[2:]) == 1, before.compiled


def test_a_run_leaves_no_thread_also_after_an_error(tmp_path: Path) -> None:
    class Fails(Shows):
        def on_train_batch_end(self, *args: Any) -> None:
            assert "lockstep-compilations" in [thread.name for thread in threading.enumerate()]
            raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        fitted(tmp_path, spmd(), module=Fails())
    assert "lockstep-compilations" not in [thread.name for thread in threading.enumerate()]


def test_real_compilations_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_once = partial(CompilationAnnouncer, after=0.0, interval=0.01)
    monkeypatch.setattr(lazy_run, "CompilationAnnouncer", at_once)
    fitted(tmp_path, spmd(), module=Shows(151), max_steps=1)
    said = capsys.readouterr().err
    begun = "torch-xla is compiling training step 1 of the first 2 of this fit, which always compile."
    assert said.count(begun) == 1
    assert "lightning-lockstep: compiled in " in said.partition(begun)[2]


def test_what_is_said_of_a_compilation() -> None:
    watch, where = CompilationWatch(after=1.0), lambda: "training step 1"
    times = [
        (0, 0, 0.0),
        (1, 0, 1.0),
        (1, 0, 1.9),
        (1, 0, 2.1),
        (1, 0, 3.0),
        (1, 0, 62.2),
        (1, 1, 70.0),
        (1, 1, 71.0),
    ]
    assert [watch.look(*counts, where) for counts in times] == [
        None,
        None,
        None,
        "torch-xla is compiling training step 1",
        None,
        "torch-xla is still compiling, for 61 s now",
        "compiled in 69 s",
        None,
    ]
    # One that is done at the next look, or soon after, is not worth a line; nor what was begun before the first look.
    watch = CompilationWatch(after=1.0)
    assert [
        watch.look(*counts, where) for counts in [(5, 4, 0.0), (6, 6, 1.0), (7, 6, 2.0), (7, 7, 2.5)]
    ] == [None] * 4
    # A long one may begin, and short ones end, between two looks.
    watch = CompilationWatch(after=1.0)
    counts_at = [(0, 0, 0.0), (3, 2, 0.2), (3, 2, 1.3), (4, 3, 9.2), (4, 3, 10.3), (4, 4, 12.0)]
    said = [watch.look(*counts, where) for counts in counts_at]
    compiling = "torch-xla is compiling training step 1"
    assert said == [None, None, compiling, "compiled in 9 s", compiling, "compiled in 3 s"]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_first_steps_are_those_of_the_fit_also_when_it_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Says(CompilationAnnouncer):
        def __init__(self, made: Any, steps_made: Any) -> None:
            super().__init__(made, steps_made, interval=0.01)
            self.where = lambda: where_in_run(made, steps_made())
            announcers.append(self)

    class Notes(Shows):
        def training_step(self, *args: Any) -> torch.Tensor:
            found.append(announcers[-1].where())
            return super().training_step(*args)

    announcers: list[Says] = []
    monkeypatch.setattr(lazy_run, "CompilationAnnouncer", Says)
    first, _ = fitted(tmp_path, spmd(), module=Notes(), max_epochs=1, enable_checkpointing=True)
    path = first.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    found.clear()
    again = trainer(tmp_path / "resumed", spmd(), max_epochs=2, enable_checkpointing=True)
    again.fit(Notes(), *loaders(), ckpt_path=path)
    assert found[:3] == [
        "training step 1 of the first 2 of this fit, which always compile",
        "training step 2 of the first 2 of this fit, which always compile",
        "training step 8; the callback RecompileMonitor shows why",
    ]


def test_evaluation_is_named_too(tmp_path: Path) -> None:
    found = []

    class Notes(Shows):
        def test_step(self, *args: Any) -> None:
            found.append(where_in_run(self.trainer, 0))

    made = trainer(tmp_path, spmd())
    made.test(Notes(), loaders()[1], verbose=False)
    assert set(found) == {"a batch of test"}
