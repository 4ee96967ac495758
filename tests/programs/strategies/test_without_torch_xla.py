"""What the strategy for XLA devices says where torch-xla is not installed; with it: tests/environments/xla.

Not in tests/unit, which runs beside torch-xla too."""

from __future__ import annotations

import lightning as L
import pytest

import lightning_lockstep  # noqa: F401 - registers the strategy
from lightning_lockstep.errors import MissingExtraError


def test_a_trainer_cannot_be_made_without_torch_xla() -> None:
    with pytest.raises(
        MissingExtraError, match=r"strategy='lockstep_xla_spmd' needs the package 'torch_xla'"
    ) as raised:
        L.Trainer(accelerator="cpu", devices=2, strategy="lockstep_xla_spmd")
    assert "pip install '.[xla]'" in str(raised.value)
