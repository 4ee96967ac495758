"""StaticShapes in fits on the CPU: the same gradients, metrics and weights as of ragged batches, in whole ones."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lockstep import AutoBatchSize, RecompileMonitor, StaticShapes, StopTogether
from lightning_lockstep._lightning import Callback, Trainer
from lightning_lockstep.errors import ConfigurationError
from tests.common.static_shapes.nets import QUIET, Net, fitted, loader, numbers

# Lightning's own use of a class of torch; and few workers or batches, which these tests are meant to have.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
# What a sum in another order may change.
CLOSE = 1e-6
PAD: dict[str, Any] = {"last_batch": "pad", "evaluation_last_batch": "pad"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_padded_batches_give_the_weights_and_metrics_of_ragged_ones(tmp_path: Path, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    ragged, expected = fitted(tmp_path, **options)
    padded, found = fitted(tmp_path, StaticShapes(**PAD), **options)
    assert {size for stage, size in expected.shapes if stage == "training"} == {6, 2}
    assert set(found.shapes) == {("training", 6), ("validation", 6)}
    assert torch.allclose(found.values(), expected.values(), atol=CLOSE)
    assert numbers(padded) == pytest.approx(numbers(ragged), abs=CLOSE)


def test_a_loss_that_passes_over_a_label_needs_no_mask(tmp_path: Path) -> None:
    """The mean of cross entropy passes over -100, and what is logged has the weight of the real samples."""
    ragged, expected = fitted(tmp_path, net=Net(asks=False))
    shapes = StaticShapes(**PAD, evaluation_at_training_size=False, fill_values={1: -100})
    padded, found = fitted(tmp_path, shapes, net=Net(asks=False))
    assert set(found.shapes) == {("training", 6), ("validation", 4)}
    assert torch.allclose(found.values(), expected.values(), atol=CLOSE)
    assert numbers(padded) == pytest.approx(numbers(ragged), abs=CLOSE)


def test_dropped_batches_are_those_of_a_loader_that_drops(tmp_path: Path) -> None:
    _, found = fitted(tmp_path, StaticShapes())
    assert [size for stage, size in found.shapes if stage == "training"] == [6] * 6
    net = Net()
    rows = loader(20, 6).dataset
    trainer = Trainer(**QUIET, default_root_dir=tmp_path)
    trainer.fit(net, DataLoader(rows, 6, drop_last=True), loader(11, 6, seed=4))
    assert torch.equal(found.values(), net.values())
    assert numbers(trainer)["val_loss"] == pytest.approx(
        numbers(fitted(tmp_path, StaticShapes())[0])["val_loss"], abs=CLOSE
    )


def test_nothing_is_compiled_after_the_first_batches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"backend": "eager", "dynamic": False}
    ragged, padded = RecompileMonitor(), RecompileMonitor()
    fitted(tmp_path, ragged, net=Net(options))
    late = {(one.stage, one.batch_idx) for one in ragged.steps if not one.is_expected}
    assert late == {("training", 3), ("validation", 2)}
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "StaticShapes(last_batch='drop') leaves such a batch out, last_batch='pad' fills it up" in said
    assert "StaticShapes(evaluation_last_batch='pad') fills such a batch up" in said
    assert (
        "same number lets both use what was compiled for it: StaticShapes(evaluation_at_training_size" in said
    )
    caplog.clear()
    torch._dynamo.reset()
    fitted(tmp_path, padded, StaticShapes(**PAD), net=Net(options))
    assert [one for one in padded.steps if not one.is_expected] == []
    assert [record for record in caplog.records if record.name.startswith("lightning_lockstep")] == []
    said = capsys.readouterr().err
    assert "none later" in said
    assert "StaticShapes: samples added by rank 0 to fill up batches: 8 in training, 3 in validation" in said


@pytest.mark.parametrize(
    ("settings", "step"),
    [({"last_batch": "pad"}, "training_step"), ({"evaluation_last_batch": "pad"}, "validation_step")],
)
def test_a_step_that_does_not_ask_is_refused_at_its_first_batch(
    tmp_path: Path, settings: dict[str, Any], step: str
) -> None:
    net = Net(asks=False)
    before = net.values().clone()
    with pytest.raises(ConfigurationError, match=f"expected {step} to ask which samples are real"):
        fitted(tmp_path, StaticShapes(**settings), net=net)
    assert torch.equal(net.values(), before), "no step was made"
    net.train()  # it was left in the middle of an evaluation
    # The strategy is as it was before: another fit, without the callback, is a plain one.
    _, plain = fitted(tmp_path, net=net)
    assert ("training", 2) in plain.shapes


def test_batch_normalisation_cannot_be_padded(tmp_path: Path) -> None:
    net = Net()
    net.layers = net.compiled = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    with pytest.raises(ConfigurationError, match=r"batch normalisation \(layers.0.*Give last_batch='drop'"):
        fitted(tmp_path, StaticShapes(last_batch="pad"), net=net)
    assert fitted(tmp_path, StaticShapes(), net=net)[0].global_step == 6


def test_a_search_for_a_batch_size_sees_its_own_batches_and_a_split_is_refused(tmp_path: Path) -> None:
    sizes = []

    class Model(Net):
        batch_size = 2

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            sizes.append(len(batch[0]))  # what the module itself keeps, a search puts back
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(20, self.batch_size)

        def val_dataloader(self) -> DataLoader[Any]:
            return loader(11, 4)

    net = Model()
    sizes_tried: Any = {"init_val": 3, "max_trials": 2, "max_val": 6, "steps_per_trial": 1}
    search = AutoBatchSize(mode="power", global_batch_size="largest", **sizes_tried)
    trainer = Trainer(
        **{**QUIET, "max_epochs": 1}, default_root_dir=tmp_path, callbacks=[search, StaticShapes(**PAD)]
    )
    with pytest.warns(UserWarning, match="4 optimizer steps instead of 10"):
        trainer.fit(net)
    found = search.optimal_batch_size
    assert found is not None and sizes[0] == 3, "the first trial has its own size"
    assert sizes[-1] == found and ("validation", found) in net.shapes
    with pytest.raises(ConfigurationError, match="on_oom='split'"):
        fitted(tmp_path, AutoBatchSize(mode="off", on_oom="split"), StaticShapes(**PAD))


def test_test_and_prediction_after_a_fit(tmp_path: Path) -> None:
    trainer, net = fitted(tmp_path, StaticShapes(**PAD))
    plain = Trainer(**QUIET, default_root_dir=tmp_path)
    expected = plain.test(net, loader(9, 4), verbose=False)
    assert {size for stage, size in net.shapes if stage == "test"} == {4, 1}
    net.shapes.clear()
    assert trainer.test(net, loader(9, 4), verbose=False)[0] == pytest.approx(expected[0], abs=CLOSE)
    assert set(net.shapes) == {("test", 6)}
    rows: Any = trainer.predict(net, loader(9, 4))
    assert [len(one) for one in rows] == [4, 4, 1], "prediction is left as it is"


def test_sequences_are_padded_to_a_few_lengths(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Sums(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.shapes.append(("training", batch["ids"].size(1)))
            return (self.layers[0].weight.sum() * batch["ids"].sum()) * 1e-3

    made: Any = [{"ids": torch.ones(2, length)} for length in (3, 5, 4, 9, 8)]
    batches = DataLoader(made, batch_size=None)
    settings: dict[str, Any] = {
        "last_batch": "keep",
        "sequence_lengths": [4, 8],
        "sequence_values": {"ids": 0},
    }
    net = Sums()
    with caplog.at_level(logging.WARNING, logger="lightning_lockstep"):
        trainer = Trainer(
            **{**QUIET, "max_epochs": 1}, default_root_dir=tmp_path, callbacks=[StaticShapes(**settings)]
        )
        trainer.fit(net, batches, loader(6, 6))
    assert [length for stage, length in net.shapes if stage == "training"] == [4, 8, 4, 9, 8]
    assert "a sequence of 9 is longer than the largest of sequence_lengths, 8" in caplog.text
    settings["sequence_values"] = {"idz": 0}
    with pytest.raises(ConfigurationError, match=r"sequence_values has 'idz'.*the keys 'ids'"):
        trainer = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[StaticShapes(**settings)])
        trainer.fit(net, batches, loader(6, 6))


class Sums(Net):
    """Notes the lengths of its sequences, by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shapes.append((str(self.current_epoch), batch["ids"].size(1)))
        return (self.layers[0].weight.sum() * batch["ids"].sum()) * 1e-3


class SavesAfter(Callback):
    """Saves a checkpoint after an optimizer step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("together", [False, True])
def test_a_fit_that_resumes_in_the_middle_of_an_epoch_goes_on_padding(tmp_path: Path, together: bool) -> None:
    made: Any = [{"ids": torch.ones(2, length)} for length in (3, 5, 4, 7, 8)]
    batches, path = DataLoader(made, batch_size=None), tmp_path / "middle.ckpt"
    settings: dict[str, Any] = {
        "last_batch": "keep",
        "sequence_lengths": [4, 8],
        "sequence_values": {"ids": 0},
    }

    def fit(*callbacks: Any, **options: Any) -> list[tuple[str, int]]:
        net = Sums()
        more = [StopTogether()] if together else []
        shapes = StaticShapes(**settings)
        Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[shapes, *more, *callbacks]).fit(
            net, batches, loader(6, 6), **options
        )
        return [one for one in net.shapes if one[0] != "validation"]

    whole = fit(SavesAfter(7, path))
    assert [length for _, length in whole] == [4, 8, 4, 8, 8] * 2
    resumed = fit(ckpt_path=path)
    assert resumed and {epoch for epoch, _ in resumed} == {"1"}
    assert {length for _, length in resumed} <= {4, 8}
    if together:  # which goes on behind the batches that were seen
        assert resumed == whole[7:]


# -- evaluation at the size of training ---------------------------------------------------------------


def sizes(net: Net, stage: str = "validation") -> list[int]:
    return [size for name, size in net.shapes if name == stage]


ONCE: dict[str, Any] = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}


def test_evaluation_keeps_its_size_where_other_samples_would_be_evaluated(tmp_path: Path) -> None:
    def fit(held_out: DataLoader[Any], **options: Any) -> list[int]:
        net = Net()
        made = Trainer(**ONCE, **options, default_root_dir=tmp_path, callbacks=[StaticShapes()])
        made.fit(net, loader(12, 6), held_out)
        return sizes(net)

    assert fit(DataLoader(loader(5, 4).dataset, 4, drop_last=True)) == [4], "not none, as with batches of 6"
    assert fit(loader(16, 4), limit_val_batches=2) == [4, 4], "two batches of 6 are other samples"
    assert fit(loader(16, 4), limit_val_batches=0.5) == [4, 4]
    assert fit(loader(16, 4)) == [6, 6, 4]


def test_another_size_of_evaluation_is_said_once_and_training_asked_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Model(Net):
        asked = 0

        def train_dataloader(self) -> DataLoader[Any]:
            self.asked += 1
            return loader(12, 6)

        def val_dataloader(self) -> list[DataLoader[Any]]:
            return [loader(9, 4), loader(8, 4), loader(12, 6)]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx)

    net = Model()
    options = {**QUIET, "reload_dataloaders_every_n_epochs": 1}
    Trainer(**options, default_root_dir=tmp_path, callbacks=[StaticShapes()]).fit(net)
    assert net.asked == 3, "once before the check of the validation, and once for each epoch"
    said = capsys.readouterr().err
    assert said.count("StaticShapes: validation takes 6 samples at once instead of 4, as training does") == 1
    assert "instead of 6" not in said


@pytest.mark.parametrize("first", [4, 8])
def test_each_loader_of_a_stage_has_its_own_size(tmp_path: Path, first: int) -> None:
    class Model(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.step(batch, f"validation {dataloader_idx}"))

    net, second = Model(), 12 - first
    shapes = StaticShapes(evaluation_last_batch="pad", evaluation_at_training_size=False)
    made = Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[shapes])
    made.fit(net, loader(12, 6), [loader(9, first), loader(9, second)])
    assert {size for name, size in net.shapes if name == "validation 0"} == {first}
    assert {size for name, size in net.shapes if name == "validation 1"} == {second}


def test_batches_of_several_loaders_at_once_are_not_padded(tmp_path: Path) -> None:
    class Model(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.step(batch["a"], "training") + self.step(batch["b"], "training")

    both = {"a": loader(12, 6), "b": loader(8, 4)}
    made = Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[StaticShapes(last_batch="pad")])
    with pytest.raises(
        ConfigurationError, match=r"last_batch='pad'\) with several loaders of training at once"
    ):
        made.fit(Model(), both, loader(6, 6))
    net = Model()
    Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[StaticShapes()]).fit(net, both, loader(6, 6))
    assert sizes(net, "training") == [6, 4, 6, 4]


def test_without_the_callback_all_samples_are_real() -> None:
    batch = [torch.ones(3, 2), torch.ones(3)]
    assert StaticShapes.real_samples(batch).tolist() == [True] * 3
    assert StaticShapes.mean(torch.tensor([1.0, 2.0, 6.0]), batch) == 3
    with pytest.raises(ConfigurationError, match="expected 3 rows, one for each sample"):
        StaticShapes.mean(torch.ones(()), batch)
    with pytest.raises(ConfigurationError, match="expected the batch of the step"):
        StaticShapes.real_samples("text")
