"""The examples run as their first lines say."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.helpers import run_script

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plain_trainer(tmp_path: Path) -> None:
    outcome = run_script([EXAMPLES / "plain_trainer.py"], cwd=tmp_path, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert "on 2 ranks" in outcome.stdout
    assert outcome.stdout.count("final train_loss") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_research_project(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(
        EXAMPLES / "research_project", project, ignore=shutil.ignore_patterns("__pycache__", "outputs")
    )
    outcome = run_script(
        [sys.executable, "train.py", "experiment=wine_two_ranks", "trainer.max_epochs=5"],
        cwd=project,
        timeout=120,
    )
    assert outcome.returncode == 0, outcome.output
    assert "run finished" in outcome.stdout
    assert len(list((project / "outputs" / "train").iterdir())) == 1
