"""A part of the random runs; all of them: ``python -m tests.replicas``."""

from __future__ import annotations

import pytest

from tests.helpers import run_ranks
from tests.replicas.fits import fits
from tests.replicas.random_runs import FAULTS, HEALTHY, RANKS, divergences, healthy, what_is_wrong


@pytest.mark.slow
def test_random_divergences_are_found_and_named() -> None:
    cases = divergences(2 * len(FAULTS), seed=2)
    for case, *outcomes in zip(
        cases, *run_ranks(RANKS, fits, cases, backend="gloo", timeout=240), strict=True
    ):
        assert what_is_wrong(case, outcomes) == "", case


@pytest.mark.slow
def test_healthy_runs_of_all_kinds_give_no_alarm() -> None:
    cases = healthy(len(HEALTHY), seed=2)
    for case, *outcomes in zip(
        cases, *run_ranks(RANKS, fits, cases, backend="gloo", timeout=240), strict=True
    ):
        assert what_is_wrong(case, outcomes) == "", case
