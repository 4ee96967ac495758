"""One real Slurm for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.slurm import Slurm, why_no_slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with Slurm() as made:
        yield made
