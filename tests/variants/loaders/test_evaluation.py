"""Evaluations on more ranks, under more strategies, against Lightning on one device."""

from __future__ import annotations

import pytest

from tests.models.distributed.mpi.launch import run_mpi
from tests.models.loaders.evaluation import evaluations
from tests.ranks.loaders.test_evaluation import check, found


def test_deepspeed() -> None:
    check(found("deepspeed 3", 3))


@pytest.mark.mpi
def test_mpi() -> None:
    check(run_mpi(3, evaluations, "mpi", 3))
