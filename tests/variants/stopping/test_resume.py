"""Each loader on two ranks: a resumed epoch goes on with the next batch."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.models.stopping.resumes import LOADERS, table
from tests.ranks.stopping import test_resume


def test_every_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    names = [name for name in LOADERS if name not in test_resume.LOADERS]
    for found in run_ranks(2, table, str(tmp_path), names, backend=None, timeout=400):
        assert {name: row for name, row in found.items() if row != "exact"} == {}
