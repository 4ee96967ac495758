"""A communication hook over mpi4py whose callback raises on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.distributed.mpi.launch import run_program


@pytest.mark.mpi
def test_a_callback_that_raises_while_that_of_another_rank_waits_ends_the_job(tmp_path: Path) -> None:
    outcome, found = run_program("open_mpi", 2, "program_hooks.py", tmp_path, arguments=["failing"])
    assert outcome.returncode != 0 and not found and not outcome.timed_out, outcome.output
    assert "KeyError: 'a bad callback on purpose'" in outcome.output
    assert outcome.leftovers == ()
