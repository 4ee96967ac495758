"""Settings of StaticShapes that cannot be used, and loaders that cannot be changed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_lockstep import StaticShapes
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.shapes.loaders import evaluation_loader, fault_of_dropping, loader_that_drops, size_of

ROWS = TensorDataset(torch.ones(20, 4))


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> object:
        return iter(range(7))


def test_all_faults_are_said_at_once() -> None:
    with pytest.raises(ConfigurationError) as raised:
        StaticShapes(
            last_batch="fill",  # type: ignore[arg-type]
            evaluation_last_batch="drop",  # type: ignore[arg-type]
            sequence_lengths=[8, 4],
            fill_values={"labels": "nothing"},  # type: ignore[dict-item]
        )
    text = str(raised.value)
    assert "last_batch='fill': expected one of 'drop', 'pad', 'keep'" in text
    assert "evaluation_last_batch='drop': expected one of 'pad', 'keep'" in text
    assert "sequence_lengths=[8, 4]: expected lengths that grow" in text
    assert "fill_values={'labels': 'nothing'}: expected a value for each key" in text
    assert "expected both or none" in text


def test_values_that_nothing_would_use_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"fill_values=.*expected 'pad' for one of them"):
        StaticShapes(fill_values={"labels": -100})
    with pytest.raises(ConfigurationError, match="sequence_values=None: expected both or none"):
        StaticShapes(sequence_lengths=[8])


def test_a_loader_drops_its_last_batch_without_being_changed() -> None:
    loader = DataLoader(ROWS, 6, num_workers=0)
    made = loader_that_drops(loader)
    assert [len(batch[0]) for batch in made] == [6, 6, 6] and len(made) == 3
    assert [len(batch[0]) for batch in loader] == [6, 6, 6, 2]
    stream = DataLoader(Stream(), 3)
    assert fault_of_dropping(stream) is None
    assert [len(batch) for batch in loader_that_drops(stream)] == [3, 3]


def test_why_a_loader_cannot_drop() -> None:
    assert "fewer samples than one batch of 30" in str(fault_of_dropping(DataLoader(ROWS, 30)))
    assert "with a list: expected a DataLoader" in str(fault_of_dropping([1]))

    class Own(BatchSampler):
        pass

    own = DataLoader(ROWS, batch_sampler=Own(SequentialSampler(ROWS), 6, drop_last=False))
    assert "its own batch sampler (Own)" in str(fault_of_dropping(own))
    assert evaluation_loader(own, 5) is None and size_of(own) is None
    assert evaluation_loader(DataLoader(Stream(), 3), 5) is None
    assert evaluation_loader(DataLoader(ROWS, 3, drop_last=True), 5) is None
    assert len(evaluation_loader(DataLoader(ROWS, 3), 5)) == 4
