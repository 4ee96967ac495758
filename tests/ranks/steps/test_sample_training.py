"""Augmentation, dropout and batch norm by sample: training on several ranks gives the weights of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_lockstep import LockstepDDPStrategy, LockstepFSDPStrategy, LockstepMPIStrategy
from tests.harness import run_ranks
from tests.models.steps.sample_fits import OF_SAMPLE, Case, furthest, made, trained

State = dict[str, Tensor]
CASES = {
    "images": Case("images", 35),
    "two ranks of padding at the end, 2 workers, accumulated": Case("images", 34, 2, workers=2),
    "float32": Case("images", 19, precision=None),
    "transformer": Case("transformer", 34),
    "transformer, accumulated": Case("transformer", 34, 2),
}


def by_ddp(names: list[str], path: str = "", stop: int = -1) -> dict[str, State]:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    cases = {name: CASES[name]._replace(stop=stop) for name in names}
    return {name: trained(LockstepDDPStrategy(**OF_SAMPLE), case, path=path) for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, State]:
    return run_ranks(1, by_ddp, list(CASES), backend=None, timeout=120)[0]


@pytest.fixture(scope="module")
def together() -> list[dict[str, State]]:
    return run_ranks(4, by_ddp, list(CASES), backend=None, timeout=240)


def test_training_changes_weights(alone: Any) -> None:
    start = {f"net.{name}": one for name, one in made("images").state_dict().items()}
    assert furthest(alone["images"], start) > 0.01


@pytest.mark.parametrize("name", CASES)
def test_weights_and_statistics_are_those_of_one_rank(name: str, device: str, alone: Any, together: Any) -> None:
    tolerance = 1e-5 if name == "float32" else 1e-11 if name.startswith("transformer") else 1e-12
    assert max(furthest(found[name], alone[name]) for found in together) < tolerance


def test_numbers_do_not_depend_on_accumulation(alone: Any, together: Any) -> None:
    assert furthest(together[0]["transformer, accumulated"], alone["transformer"]) < 1e-11


def test_a_resume_in_mid_epoch_on_other_ranks_is_the_run_that_never_stopped(tmp_path: Path, alone: Any) -> None:
    path = str(tmp_path / "half.ckpt")
    run_ranks(3, by_ddp, ["images"], path, 2, backend=None)
    found = run_ranks(2, by_ddp, ["images"], path, backend=None)[0]
    assert furthest(found["images"], alone["images"]) < 1e-12


OTHERS: dict[str, Any] = {
    "fsdp": lambda: LockstepFSDPStrategy(**OF_SAMPLE),
    "mpi": lambda: LockstepMPIStrategy(backend="gloo", **OF_SAMPLE),
}


def by_another(name: str) -> State:
    torch.set_num_threads(1)
    return trained(OTHERS[name](), CASES["images"])


@pytest.mark.parametrize("name", OTHERS)
def test_other_strategies_have_the_weights_of_one_rank(name: str, alone: Any) -> None:
    found = run_ranks(2, by_another, name, backend=None)[0]
    assert furthest(found, alone["images"]) < 1e-12
