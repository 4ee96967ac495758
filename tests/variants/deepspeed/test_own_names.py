"""Names of one's own in each stage, precision and way of changing them, on one and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.common.deepspeed.own_names import (
    CASES,
    CROSSED,
    check,
    check_consolidated,
    resume,
    write_and_resume,
)
from tests.helpers import run_ranks

OPTIONS: dict[str, Any] = {"short": [1, 3], "plain": [0, 2, 3], "crossed": CROSSED}


def on_one(folder: str) -> dict[str, Any]:
    return resume(1, folder, CASES, **OPTIONS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two ranks")
    for found in run_ranks(2, write_and_resume, str(folder), CASES, OPTIONS, timeout=300):
        check(found, folder)
    return folder


def test_each_weight_arrives_on_one_rank(written: Path) -> None:
    (found,) = run_ranks(1, on_one, str(written), timeout=300)
    check(found, written)


def test_a_consolidated_file_has_the_names_that_the_module_reads(written: Path) -> None:
    check_consolidated(written, CASES)
