"""Torch's communication hooks of DDP over gloo and over mpi4py: which work, with equal weights on all ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.distributed import ddp_reducer
from lightning_lockstep.errors import CollectiveStallError
from tests.harness import run_ranks
from tests.models.distributed.mpi.launch import run_program
from tests.models.strategies.communication_hooks import HOOKS, fits_with_hooks


def as_expected(numbers: dict[str, float], of_rank_1: dict[str, float]) -> dict[str, float]:
    """Hold what each hook should do; return the sum of the weights by hook."""
    assert list(numbers) == list(HOOKS) and numbers == of_rank_1
    assert numbers["allreduce"] == numbers["none"] and numbers["own, chained"] == numbers["none"]
    assert numbers["power_sgd"] != numbers["none"] and numbers["fp16"] != numbers["none"]
    return numbers


def bucket_of(index: int) -> Any:
    return SimpleNamespace(buffer=lambda: torch.ones(2), index=lambda: index)


def test_a_hook_that_completes_its_futures_in_a_later_call_ends_in_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ddp_reducer, "_LATER", 0.0)

    def deferring(state: Any, bucket: Any) -> Any:
        return torch.futures.Future()

    hook, _ = ddp_reducer.compression_hook(deferring, None, None, timeout=0.1)
    assert hook is not None
    with pytest.raises(CollectiveStallError, match=r"deferring returned for bucket 3 .* after 0\.1 s"):
        hook(None, bucket_of(3))


@pytest.mark.mpi
def test_each_hook_over_gloo_and_mpi4py(tmp_path: Path) -> None:
    gloo = as_expected(*run_ranks(2, fits_with_hooks, LockstepDDPStrategy, backend=None, timeout=180))
    outcome, found = run_program("open_mpi", 2, "program_hooks.py", tmp_path, timeout=180)
    assert outcome.returncode == 0 and len(found) == 2, outcome.output
    assert as_expected(found[0], found[1]) == gloo
