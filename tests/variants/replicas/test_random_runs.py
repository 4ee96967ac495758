"""A part of the random runs; all of them: ``python -m tests.models.replicas``."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks
from tests.models.replicas.fits import fits
from tests.models.replicas.random_runs import (
    FAULTS,
    HEALTHY,
    HEALTHY_UNDER_HSDP,
    HSDP_RANKS,
    RANKS,
    divergences,
    healthy,
    what_is_wrong,
)


@pytest.mark.parametrize("hsdp", [False, True])
def test_divergences_are_found_and_healthy_runs_give_no_alarm(hsdp: bool) -> None:
    kinds = HEALTHY_UNDER_HSDP if hsdp else HEALTHY
    cases = [*divergences(len(FAULTS), seed=2, hsdp=hsdp), *healthy(len(kinds), seed=2, hsdp=hsdp)]
    of_ranks = run_ranks(HSDP_RANKS if hsdp else RANKS, fits, cases, backend="gloo", timeout=400)
    wrong = {
        str(case): text
        for case, *outcomes in zip(cases, *of_ranks, strict=True)
        if (text := what_is_wrong(case, outcomes))
    }
    assert wrong == {}
