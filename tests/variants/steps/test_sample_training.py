"""Augmentation, dropout and batch norm by sample: all divisions, every strategy, compiled code, two lengths of data."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.same_numbers.program import Program
from benchmarks.same_numbers.run import check
from lightning_lockstep import LockstepDDPStrategy, LockstepDeepSpeedStrategy, LockstepFSDPStrategy
from tests.harness import run_ranks
from tests.models.steps import sample_fits
from tests.models.steps.sample_fits import OF_SAMPLE, Case, Net, furthest, trained

CASES = {
    f"{kind} {samples} {micro} {workers}": Case(kind, samples, micro, workers)
    for kind, samples, micro, workers in (
        ("images", 101, 1, 0),
        ("images", 101, 2, 0),
        ("images", 98, 2, 2),
        ("transformer", 101, 1, 2),
        ("transformer", 98, 2, 0),
    )
}
OTHER = {
    "manual optimization": Case("images", 18, manual=True),
    "batches of its own": Case("transformer", 32, whole=True),
}
SINGLE = {"images": Case("images", 101, precision=None)}


def fits(cases: dict[str, Case], strategy: Any = LockstepDDPStrategy) -> dict[str, dict[str, Tensor]]:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    return {name: trained(strategy(**OF_SAMPLE), case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Tensor]]:
    return run_ranks(1, fits, CASES, backend=None, timeout=300)[0]


def test_weights_and_statistics_do_not_depend_on_ranks_or_workers(alone: Any) -> None:
    found = run_ranks(3, fits, CASES, backend=None, timeout=500)[0]
    far = {name: furthest(found[name], alone[name]) for name in CASES}
    assert {name: one for name, one in far.items() if one > (1e-12 if "images" in name else 1e-11)} == {}


def test_optimizers_and_batches_of_a_programs_own() -> None:
    expected = run_ranks(1, fits, OTHER, backend=None)[0]
    found = run_ranks(4, fits, OTHER, backend=None, timeout=200)[0]
    assert max(furthest(found[name], expected[name]) for name in OTHER) < 1e-11


def test_a_divided_model_has_the_weights_of_one_rank(alone: Any) -> None:
    names = ["images 101 2 0", "transformer 98 2 0"]
    cases = {name: CASES[name] for name in names}
    found = run_ranks(3, fits, cases, LockstepFSDPStrategy, backend=None, timeout=200)[0]
    assert max(furthest(found[name], alone[name]) for name in names) < 1e-11


@pytest.mark.parametrize("stage", [2, 3])
def test_each_stage_of_zero_has_the_weights_of_one_rank(stage: int) -> None:
    strategy = partial(LockstepDeepSpeedStrategy, stage=stage)
    found = run_ranks(2, fits, SINGLE, strategy, backend=None, timeout=200)[0]
    expected = run_ranks(1, fits, SINGLE, backend=None)[0]
    assert furthest(found["images"], expected["images"]) < 1e-5


@pytest.mark.mpi
def test_ranks_of_mpirun_have_the_weights_of_one_rank() -> None:
    (found,) = check([Program(ranks=3, samples=23, batch=2, strategy="mpi", model="net", real=True, epochs=2)])
    assert not found.verdict.differences, found.verdict.differences


class Compiled(Net):
    """Compiles its network without another name for its weights."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.net.compile()


def compiled() -> dict[str, Tensor]:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    sample_fits.Net = Compiled  # type: ignore[misc]  # this process ends with the fit
    return trained(LockstepDDPStrategy(**OF_SAMPLE), SINGLE["images"])


def test_a_compiled_network_has_the_weights_of_one_that_is_not(device: str) -> None:
    expected = run_ranks(1, fits, SINGLE, backend=None)[0]
    found = run_ranks(2, compiled, backend=None, timeout=300)[0]
    assert furthest(found, expected["images"]) < 1e-5
