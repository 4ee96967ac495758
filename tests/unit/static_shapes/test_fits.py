"""StaticShapes in fits on the CPU: the same gradients, metrics and weights as of ragged batches, in whole ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lockstep import AutoBatchSize, StaticShapes, StopTogether
from lightning_lockstep._lightning import Callback, Trainer
from lightning_lockstep.errors import ConfigurationError
from tests.models.static_shapes.nets import QUIET, Net, fitted, loader, numbers

# Lightning's own use of a class of torch; and few workers or batches, which these tests are meant to have.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
ONCE: dict[str, Any] = {**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0}
# What is looked at is how often torch's compiler runs; the code that it makes is not.
OPTIONS: dict[str, Any] = {"backend": "eager", "dynamic": False}
# What a sum in another order may change.
CLOSE = 1e-6
PAD: dict[str, Any] = {"batch_size": "train"}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_padded_batches_give_the_weights_and_metrics_of_ragged_ones(tmp_path: Path, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    ragged, expected = fitted(tmp_path, **options)
    padded, found = fitted(tmp_path, StaticShapes(**PAD), **options)
    assert {size for stage, size in expected.shapes if stage == "training"} == {6, 2}
    # The check before training does not know its size yet.
    assert set(found.shapes) == {("training", 6), ("validation", 4), ("validation", 6)}
    assert torch.allclose(found.values(), expected.values(), atol=CLOSE)
    assert numbers(padded) == pytest.approx(numbers(ragged), abs=CLOSE)


def test_a_loss_that_passes_over_a_label_needs_no_mask(tmp_path: Path) -> None:
    """The mean of cross entropy passes over -100, and what is logged has the weight of the real samples."""
    ragged, expected = fitted(tmp_path, net=Net(asks=False))
    shapes = StaticShapes(**PAD, ignored={1: -100})
    padded, found = fitted(tmp_path, shapes, net=Net(asks=False))
    assert set(found.shapes) >= {("training", 6), ("validation", 6)}
    assert torch.allclose(found.values(), expected.values(), atol=CLOSE)
    assert numbers(padded) == pytest.approx(numbers(ragged), abs=CLOSE)


def late(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.startswith("lightning_lockstep")]


def test_a_batch_that_is_compiled_late_is_named_with_its_shapes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = StaticShapes()
    fitted(tmp_path, shapes, net=Net(OPTIONS))
    assert [(one.stage, one.batch_idx, one.graphs) for one in shapes.late] == [
        ("training", 3, 1),
        ("validation", 2, 1),
    ]
    training, evaluation = late(caplog)
    assert training.startswith("StaticShapes: training batch 3 (step 4) compiled 1 graph in ")
    assert "its shapes are (2, 4), (2,), those of the batch before (6, 4), (6,). batch_size='train'" in training
    assert "validation batch 2 (step 4) compiled 1 graph" in evaluation


def test_nothing_is_compiled_after_the_first_batches_once_they_are_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = StaticShapes(**PAD)
    trainer = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[shapes])
    trainer.fit(Net(OPTIONS), loader(20, 6), loader(11, 6, seed=4))
    assert shapes.late == [] and late(caplog) == []


class Compiles(Net):
    """Compiles again in some batches for another reason than their shapes; nothing of it is a module's."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx >= 4:
            torch._dynamo.reset()
            self.compiled = torch.compile(self.layers, backend="aot_eager", dynamic=False)
        return super().training_step(batch, batch_idx)


def test_the_first_optimizer_steps_are_expected_to_compile_and_known_shapes_are_no_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = StaticShapes()
    options: Any = {**ONCE, "accumulate_grad_batches": 3, "limit_val_batches": 0}
    trainer = Trainer(**options, default_root_dir=tmp_path, callbacks=[shapes])
    net = Compiles()
    trainer.fit(net, loader(42, 6), loader(6, 6))
    assert [(one.batch_idx, one.graphs) for one in shapes.late] == [(6, 1)]
    assert "with the shapes of the batch before it; for torch.compile, TORCH_LOGS" in late(caplog)[0]


def test_a_step_that_does_not_ask_is_refused_at_its_first_batch(tmp_path: Path) -> None:
    net = Net(asks=False)
    before = net.values().clone()
    with pytest.raises(ConfigurationError, match="expected validation_step to ask which samples are real"):
        fitted(tmp_path, StaticShapes(**PAD), net=net)
    net.train()  # it was left in the middle of an evaluation
    with pytest.raises(ConfigurationError, match=r"expected training_step to ask.*or drop_last=True"):
        fitted(tmp_path, StaticShapes(**PAD), net=net, num_sanity_val_steps=0)
    assert torch.equal(net.values(), before), "no step was made"
    # The strategy is as it was before: another fit, without the callback, is a plain one.
    _, plain = fitted(tmp_path, net=net)
    assert ("training", 2) in plain.shapes


def test_a_loader_that_drops_its_last_batch_needs_no_mask(tmp_path: Path) -> None:
    drops = DataLoader(loader(20, 6).dataset, 6, drop_last=True)
    net = Net(asks=False)
    net.layers.append(torch.nn.BatchNorm1d(3))  # whose statistics would count added samples
    options: Any = {**ONCE, "limit_val_batches": 0}
    Trainer(**options, default_root_dir=tmp_path, callbacks=[StaticShapes(**PAD)]).fit(net, drops, loader(6, 6))
    assert [size for _, size in net.shapes] == [6, 6, 6]


def test_batch_normalisation_cannot_be_padded(tmp_path: Path) -> None:
    net = Net()
    net.layers = net.compiled = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    with pytest.raises(ConfigurationError, match=r"batch normalisation \(layers.0.*drop_last=True"):
        fitted(tmp_path, StaticShapes(**PAD), net=net)


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
    search = AutoBatchSize(global_batch_size="largest", **sizes_tried)
    trainer = Trainer(**{**QUIET, "max_epochs": 1}, default_root_dir=tmp_path, callbacks=[search, StaticShapes(**PAD)])
    with pytest.warns(UserWarning, match="an epoch has fewer optimizer steps"):
        trainer.fit(net)
    found = search.optimal_batch_size
    assert found is not None and sizes[0] == 3, "the first trial has its own size"
    assert sizes[-1] == found
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


class Sums(Net):
    """Notes the lengths of its sequences, by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shapes.append((str(self.current_epoch), batch["ids"].size(1)))
        return (self.layers[0].weight.sum() * batch["ids"].sum()) * 1e-3


def test_sequences_are_padded_to_a_few_lengths(tmp_path: Path) -> None:
    made: Any = [{"ids": torch.ones(2, length)} for length in (3, 5, 4, 9, 8)]
    batches = DataLoader(made, batch_size=None)
    settings: dict[str, Any] = {"lengths": [4, 8], "pad_values": {"ids": 0}}
    net = Sums()
    trainer = Trainer(**{**QUIET, "max_epochs": 1}, default_root_dir=tmp_path, callbacks=[StaticShapes(**settings)])
    trainer.fit(net, batches, loader(6, 6))
    assert [length for epoch, length in net.shapes if epoch == "0"] == [4, 8, 4, 9, 8]
    settings["pad_values"] = {"idz": 0}
    with pytest.raises(ConfigurationError, match=r"values for 'idz': expected keys.*a dict with 'ids'"):
        trainer = Trainer(**QUIET, default_root_dir=tmp_path, callbacks=[StaticShapes(**settings)])
        trainer.fit(net, batches, loader(6, 6))


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
    settings: dict[str, Any] = {"lengths": [4, 8], "pad_values": {"ids": 0}}

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


def test_each_loader_of_a_stage_has_the_size_of_training_or_its_own_larger_one(tmp_path: Path) -> None:
    class Model(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val_loss", self.step(batch, f"validation {dataloader_idx}"))

    net = Model()
    made = Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[StaticShapes(**PAD)])
    made.fit(net, loader(12, 6), [loader(9, 4), loader(9, 8)])
    assert {one for one in net.shapes if one[0] != "training"} == {("validation 0", 6), ("validation 1", 8)}
    net.shapes.clear()
    made = Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[StaticShapes(batch_size=7)])
    made.fit(net, loader(12, 6), [loader(9, 4), loader(9, 8)])
    assert set(net.shapes) == {("training", 7), ("validation 0", 7), ("validation 1", 8)}


def test_batches_of_several_loaders_at_once_are_not_padded(tmp_path: Path) -> None:
    class Model(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.step(batch["a"], "training") + self.step(batch["b"], "training")

    both = {"a": loader(12, 6), "b": loader(8, 4)}
    made = Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[StaticShapes(**PAD)])
    with pytest.raises(ConfigurationError, match=r"batch_size='train'\) with several loaders of training at once"):
        made.fit(Model(), both, loader(6, 6))
    net = Model()
    Trainer(**ONCE, default_root_dir=tmp_path, callbacks=[StaticShapes()]).fit(net, both, loader(6, 6))
    assert [size for stage, size in net.shapes if stage == "training"] == [6, 4, 6, 4]
