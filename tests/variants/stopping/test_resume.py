"""Each loader on two ranks: a resumed epoch goes on with the next batch."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.models.stopping.resumes import FROM_ONE, LOADERS, TO_FEWER, check_numbers, resume_all, save_all, table
from tests.ranks.stopping import test_resume


def test_every_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    names = [name for name in LOADERS if name not in test_resume.LOADERS]
    for found in run_ranks(2, table, str(tmp_path), names, backend=None, timeout=400):
        assert {name: row for name, row in found.items() if row != "exact"} == {}


def test_another_number_of_ranks_is_exact_or_said(tmp_path: Path) -> None:
    of_two = run_ranks(2, save_all, str(tmp_path), TO_FEWER, backend=None)
    check_numbers(TO_FEWER, of_two, run_ranks(1, resume_all, str(tmp_path), TO_FEWER, backend=None))
    of_one = run_ranks(1, save_all, str(tmp_path), FROM_ONE, backend=None)
    check_numbers(FROM_ONE, of_one, run_ranks(2, resume_all, str(tmp_path), FROM_ONE, backend=None))
