"""gather_uneven on other numbers of ranks, and beside Accelerate's gather."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_lockstep import gather_uneven
from tests.common.distributed.uneven_gathers import all_cases, made
from tests.helpers import run_ranks, world_size


@world_size(2, 4)
def test_other_numbers_of_ranks(world_size: int) -> None:
    for seen in run_ranks(world_size, all_cases, timeout=120):
        assert not any(seen.values()), seen


def as_accelerate_gathers() -> list[bool]:
    from accelerate.state import PartialState
    from accelerate.utils import gather, pad_across_processes

    PartialState(cpu=True)
    own = made(dist.get_rank(), 3 - dist.get_rank(), 4)
    padded = gather(pad_across_processes(own)).chunk(dist.get_world_size())
    parts = gather_uneven(own)
    return [part.tolist() == long[: len(part)].tolist() for part, long in zip(parts, padded, strict=True)]


def test_uneven_shapes_give_what_accelerate_gathers_without_its_padding() -> None:
    pytest.importorskip("accelerate", reason="install accelerate, with whose gather this compares")
    assert run_ranks(2, as_accelerate_gathers) == [[True, True]] * 2
