"""Whether to stop, from numbers: the same as Lightning's, without a Trainer."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_lockstep import ConfigurationError, MetricMissingError, SyncedEarlyStopping
from lightning_lockstep._lightning import EarlyStopping, EarlyStoppingReason
from lightning_lockstep.callbacks.early_stopping import Entry, missing_message, reduce_entries

NAN, INF = math.nan, math.inf


def entries(*values: float | None) -> list[Entry]:
    return [Entry(v, names=() if v is not None else ("train_loss",)) for v in values]


@pytest.mark.parametrize(
    ("how", "values", "value", "not_finite"),
    [
        ("mean", (1.0, 3.0), 2.0, ()),
        ("min", (1.0, 3.0), 1.0, ()),
        ("max", (1.0, 3.0), 3.0, ()),
        ("rank0", (1.0, 3.0), 1.0, ()),
        ("mean", (1.0, NAN), NAN, (1,)),
        ("min", (1.0, NAN), NAN, (1,)),
        ("max", (NAN, 3.0), NAN, (0,)),
        ("rank0", (1.0, NAN), 1.0, ()),
        ("min", (1.0, INF), 1.0, (1,)),
        ("mean", (None, 3.0), 3.0, ()),
        ("rank0", (None, 3.0), 3.0, ()),
    ],
)
def test_one_value_is_made_of_all_ranks(how, values, value, not_finite):
    reduced, found = reduce_entries(entries(*values), how)
    assert found == not_finite
    torch.testing.assert_close(reduced, torch.tensor(value), equal_nan=True)


def test_the_dtype_is_the_metrics():
    assert reduce_entries([Entry(0.1, torch.float64)] * 2, "mean")[0].dtype == torch.float64
    assert reduce_entries([Entry(3.0, torch.int64)], "mean")[0].dtype == torch.int64
    assert reduce_entries([Entry(3.0, torch.int64), Entry(4.0, torch.int64)], "mean")[0] == 3.5


def a_trainer():
    """What early stopping asks of a Trainer."""
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, all: decision)
    return SimpleNamespace(fast_dev_run=False, current_epoch=7, should_stop=False, strategy=strategy)


def stock_and_ours(**settings):
    return EarlyStopping("m", **settings), SyncedEarlyStopping("m", **settings)


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_values_ends_as_with_lightnings(seed):
    chance = random.Random(seed)
    settings = {
        "mode": chance.choice(["min", "max"]),
        "patience": chance.randint(0, 4),
        "min_delta": chance.choice([0.0, 0.1, 0.25, -0.1]),
        "check_finite": chance.random() < 0.5,
        "stopping_threshold": chance.choice([None, 0.1, 2.0]),
        "divergence_threshold": chance.choice([None, 3.0]),
    }
    stock, ours = stock_and_ours(**settings)
    for _ in range(25):
        number = chance.choice([NAN, INF, 0.9, 1.0, 0.1]) if chance.random() < 0.2 else chance.random() * 3
        value = torch.tensor(number)
        trainers = a_trainer(), a_trainer()
        for callback, trainer in zip((ours, stock), trainers, strict=True):
            trainer.callback_metrics = {"m": value}
            callback._run_early_stopping_check(trainer)
        assert trainers[0].should_stop == trainers[1].should_stop
        mine, theirs = ours.state_dict(), stock.state_dict()
        torch.testing.assert_close(mine.pop("best_score"), theirs.pop("best_score"), equal_nan=True)
        assert mine == theirs


def test_attributes_and_state_are_lightnings():
    stock, ours = stock_and_ours(min_delta=0.5, mode="max")
    assert isinstance(ours, EarlyStopping) and ours.state_key == stock.state_key
    assert all(hasattr(ours, name) for name in vars(stock)) and ours.min_delta == stock.min_delta
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours._evaluate_stopping_criteria(torch.tensor(2.0))
    stock.load_state_dict(ours.state_dict())
    back = SyncedEarlyStopping("m", mode="max")
    back.load_state_dict(stock.state_dict())
    assert back.state_dict() == ours.state_dict()


def test_what_is_not_finite_on_one_rank_stops_whatever_the_others_have_and_is_named():
    for how, other in (("min", NAN), ("min", INF), ("max", -INF), ("mean", INF)):
        ours, trainer = SyncedEarlyStopping("m", mode="min", reduce=how), a_trainer()
        ours._check(trainer, entries(1.0, other))
        assert trainer.should_stop and ours.stopping_reason is EarlyStoppingReason.NON_FINITE_METRIC
        assert ours.stopping_reason_message.startswith(f"Monitored metric m = {other} is not finite.")
        assert "It is not finite on rank 1." in ours.stopping_reason_message
        ours, trainer = SyncedEarlyStopping("m", reduce=how, check_finite=False), a_trainer()
        ours._check(trainer, entries(1.0, other))
        assert not trainer.should_stop


def test_the_messages_for_a_missing_metric():
    nobody = missing_message("val_los", [Entry(None, names=("val_loss", "acc"))] * 2)
    assert nobody.startswith("Early stopping conditioned on metric `val_los` which is not available.")
    assert "`val_loss`, `acc`" in nobody and "Did you mean 'val_loss'?" in nobody
    some = missing_message("m", entries(1.0, None, 2.0))
    assert "which is logged by ranks 0,2 and not by rank 1" in some and "use_present" in some


@pytest.mark.parametrize(
    ("values", "missing", "strict", "expected"),
    [
        ((1.0, 3.0), "error", True, 2.0),
        ((1.0, None), "error", True, "which is logged by rank 0 and not by rank 1"),
        ((1.0, None), "error", False, "which is logged by rank 0 and not by rank 1"),
        ((1.0, None), "use_present", True, 1.0),
        ((None, None), "use_present", True, "which is not available"),
        ((None, None), "error", False, None),
    ],
)
def test_a_missing_metric_is_an_error_unless_that_is_allowed(values, missing, strict, expected):
    ours, trainer = SyncedEarlyStopping("m", missing=missing, strict=strict), a_trainer()
    if isinstance(expected, str):
        with pytest.raises(MetricMissingError) as caught:
            ours._check(trainer, entries(*values))
        assert expected in str(caught.value)
    else:
        ours._check(trainer, entries(*values))
        assert float(ours.best_score) == (math.inf if expected is None else expected)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_delta": NAN}, "min_delta=nan"),
        ({"patience": -1}, "patience=-1"),
        ({"patience": 1.5}, "patience=1.5"),
        ({"mode": "lowest"}, "mode='lowest': expected one of 'min', 'max'"),
        ({"reduce": "sum"}, "reduce='sum': expected one of 'mean', 'min', 'max', 'rank0'"),
        ({"missing": "ignore"}, "missing='ignore'"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(ConfigurationError, match=text.replace("(", r"\(")):
        SyncedEarlyStopping("m", **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"patience": INF},
        {"patience": np.int64(3)},
        {"min_delta": np.float32(0.1)},
        {"min_delta": np.float64(-0.01), "mode": "max"},
    ],
)
def test_numbers_that_lightning_takes(arguments):
    stock, ours = EarlyStopping("m", **arguments), SyncedEarlyStopping("m", **arguments)
    assert (ours.patience, ours.min_delta) == (stock.patience, stock.min_delta)
    assert {type(ours.patience), type(ours.min_delta)} <= {int, float}
