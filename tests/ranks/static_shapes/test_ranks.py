"""StaticShapes on two ranks whose last batches have different numbers of samples."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy, StaticShapes
from lightning_lockstep._lightning import Trainer
from tests.harness import run_ranks
from tests.models.static_shapes.nets import QUIET, Net, loader, numbers

PAD: dict[str, Any] = {"batch_size": "train"}


def fit(train: DataLoader[Any], held_out: DataLoader[Any], *callbacks: Any) -> tuple[Trainer, Net]:
    options = {**QUIET, "devices": 2, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    strategy = LockstepDDPStrategy(process_group_backend="gloo")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(strategy=strategy, callbacks=list(callbacks), default_root_dir=folder, **options)
        net = Net()
        trainer.fit(net, train, held_out)
    return trainer, net


def fits(rank: int) -> dict[str, Any]:
    """Ragged and padded."""
    # Rank 0 has batches of 6, 6, 6 and 1, rank 1 of 6, 6, 6 and 4; in evaluation of 4, 4, 3 and of 4, 4, 1.
    train, held_out = loader((19, 22)[rank], 6, seed=rank), loader((11, 9)[rank], 4, seed=rank + 9)
    found: dict[str, Any] = {}
    for name, callbacks in (("ragged", []), ("padded", [StaticShapes(**PAD)])):
        trainer, net = fit(train, held_out, *callbacks)
        found[name] = (net.values().tolist(), numbers(trainer))
    found["sizes"] = sorted(set(net.shapes))
    return found


def of_environment() -> dict[str, Any]:
    import os

    return fits(int(os.environ["RANK"]))


def test_gradients_and_metrics_are_those_of_ragged_batches_on_two_ranks() -> None:
    both = run_ranks(2, of_environment, backend=None, timeout=150)
    for found in both:
        (values, metrics), (expected, expected_metrics) = found["padded"], found["ragged"]
        assert values == pytest.approx(expected, abs=1e-6)
        assert metrics == pytest.approx(expected_metrics, abs=1e-6)
        assert found["sizes"] == [("training", 6), ("validation", 6)]
    assert both[0]["padded"][0] == both[1]["padded"][0]
