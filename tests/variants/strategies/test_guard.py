"""The collective guard: ways to part and to start that are not in ``tests/programs``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import run_script
from tests.models.distributed.mpi.launch import mpi_environ
from tests.models.strategies.guard import LIMIT, SCRIPT, check_different, check_kept, check_stall, ended, run


@pytest.mark.parametrize(
    ("case", "start", "expected"),
    [
        (
            "operations",
            "spawn",
            (r"0 all_reduce\(sum\) float32 \(4,\) .* in part_ways", r"1 broadcast from 0 .* <- differs"),
        ),
        # One that calls a layer alone, to log, gathers one part more.
        ("alone", "fsdp", (r"0 all_gather float32 .* backward", r"1 all_reduce float32 .* <- differs")),
    ],
)
def test_ranks_that_call_different_things_raise_the_same(
    tmp_path: Path, case: str, start: str, expected: tuple[str, str]
) -> None:
    check_different(tmp_path, case, start, expected)


def test_a_rank_that_waits_for_its_data_is_named_with_its_place(tmp_path: Path) -> None:
    outcome = run(tmp_path, "loader")
    check_stall(outcome, r"\w+.py:\d+ in \w+")
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to collective #")


@pytest.mark.mpi
def test_a_rank_that_never_comes_over_mpi_is_named_with_its_place(tmp_path: Path) -> None:
    script = [str(SCRIPT), "sleep", str(tmp_path), "mpi"]
    outcome = ended(run_script(script, timeout=LIMIT, env=mpi_environ()))
    check_stall(outcome, r"guard_script.py:\d+ in keep_waiting")
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to collective #", last=False)
