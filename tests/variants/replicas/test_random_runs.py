"""A part of the random runs; all of them: ``python -m tests.replicas``."""

from __future__ import annotations

import pytest

from tests.common.replicas.fits import Case, fits
from tests.common.replicas.random_runs import (
    FAULTS,
    HEALTHY,
    HEALTHY_UNDER_HSDP,
    HSDP_RANKS,
    RANKS,
    divergences,
    healthy,
    what_is_wrong,
)
from tests.helpers import run_ranks


@pytest.mark.parametrize("hsdp", [False, True])
def test_random_divergences_are_found_and_named(hsdp: bool) -> None:
    check(divergences(len(FAULTS) if hsdp else 2 * len(FAULTS), seed=2, hsdp=hsdp), hsdp)


@pytest.mark.parametrize("hsdp", [False, True])
def test_healthy_runs_of_all_kinds_give_no_alarm(hsdp: bool) -> None:
    check(healthy(len(HEALTHY_UNDER_HSDP if hsdp else HEALTHY), seed=2, hsdp=hsdp), hsdp)


def check(cases: list[Case], hsdp: bool) -> None:
    of_ranks = run_ranks(HSDP_RANKS if hsdp else RANKS, fits, cases, backend="gloo", timeout=240)
    for case, *outcomes in zip(cases, *of_ranks, strict=True):
        assert what_is_wrong(case, outcomes) == "", case
