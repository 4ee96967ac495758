"""Files of one checkpoint put together: its name, and values that lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep.deepspeed.checkpoints.consolidation import put_together
from lightning_lockstep.deepspeed.checkpoints.file_names import consolidated_name
from lightning_lockstep.deepspeed.checkpoints.files import Checkpoint
from lightning_lockstep.errors import ConfigurationError


def test_the_name_of_a_consolidated_file() -> None:
    assert consolidated_name(Path("checkpoints/last.ckpt")) == Path("checkpoints/last.consolidated.ckpt")


@pytest.mark.parametrize("held", [3, 6])
@pytest.mark.parametrize("state", [{}, {"fp32_flat_groups": []}], ids=["stage 2", "stage 3"])
def test_a_parameter_of_which_values_lack_is_an_error_and_never_zeros(held: int, state: dict[str, Any]) -> None:
    checkpoint = Checkpoint(Path("last.ckpt"), [{"param_shapes": [{"weight": (2, 2)}]}], [state])
    with pytest.raises(ConfigurationError, match=rf"hold {held} values of .*, expected 4\."):
        put_together(checkpoint, [[torch.ones(held)]])
