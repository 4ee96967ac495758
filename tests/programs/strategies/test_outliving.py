"""A run outlives its ranks: what is left of a fit of which three of four ranks are killed, and what ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.strategies.outliving import Fit, check_same, fit


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    return fit(tmp_path_factory.mktemp("whole") / "run", "end", max_epochs=2)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Four ranks become one: rank 2 dies in a backward, rank 0 while it saves, rank 3 in a validation."""
    orders = ("2:backward:4", "0:save:10", "3:validation:13")
    return fit(tmp_path_factory.mktemp("lost") / "run", "continue", *orders, max_epochs=2)


def test_a_run_that_loses_nobody_says_nothing(undisturbed: Fit) -> None:
    assert len(undisturbed.weights()) == 4 and not undisturbed.lost()
    assert not list(undisturbed.folder.rglob("lost.json"))


def test_weights_samples_logs_and_checkpoints_are_those_of_an_undisturbed_run(disturbed: Fit, undisturbed: Fit) -> None:
    check_same(disturbed, undisturbed)


def test_the_last_lines_and_a_file_say_who_was_lost_where(disturbed: Fit) -> None:
    lines = [line.partition(" after ")[0] for line in disturbed.lost()]
    assert lines == [
        "lightning-lockstep: rank 2 was lost at epoch 0, step 4 (SIGKILL); went on with 3 ranks",
        "lightning-lockstep: rank 0 was lost at epoch 0, step 10 (SIGKILL); went on with 2 ranks",
        "lightning-lockstep: rank 3 was lost at epoch 0, step 13, stage validate (SIGKILL); went on with 1 rank",
    ]
    assert all(line.endswith(" s; no step was lost.") for line in disturbed.lost())
    (path,) = disturbed.folder.glob("csv/*/lost.json")
    kept = json.loads(path.read_text())["lost"]
    assert [(one["ranks"], one["went_on_with"]) for one in kept] == [([2], 3), ([0], 2), ([3], 1)]


def test_spare_processes_take_the_places_of_lost_ranks(undisturbed: Fit, tmp_path: Path) -> None:
    replaced = fit(tmp_path / "run", "continue", "2:backward:4", "0:save:10", spares=2, max_epochs=2)
    check_same(replaced, undisturbed)
    assert [line.partition(" after ")[0].rpartition("; ")[2] for line in replaced.lost()] == [
        "went on with 4 ranks"
    ] * 2
    assert len(replaced.weights()) == 4


def test_a_process_that_is_started_after_a_loss_joins_the_others(undisturbed: Fit, tmp_path: Path) -> None:
    orders = ("2:backward:4", "3:backward:4", "5:joins:12")  # one spare process, and later process 5 or 6
    joined = fit(tmp_path / "run", "continue", *orders, spares=1, max_epochs=2)
    check_same(joined, undisturbed)
    lost, came = joined.lost()
    assert "ranks 2-3 were lost at epoch 0, step 4 (SIGKILL); went on with 3 ranks" in lost
    assert "a new process joined at epoch 0, step " in came and "; went on with 4 ranks after " in came
    assert len(joined.weights()) == 4


def test_a_loss_that_comes_again_at_the_same_step_ends_the_run(tmp_path: Path) -> None:
    ended = fit(tmp_path / "run", "continue", "2:forward:4", "3:forward:4", "1:again:4")
    assert ended.outcome.returncode == 137, ended.outcome.output
    assert "rank 1 of 4" in ended.outcome.stderr
    assert "it was not the first one there: ranks 2-3 were lost at epoch 0, step 4" in ended.outcome.stderr
    assert ended.outcome.leftovers == ()


def test_fewer_ranks_than_asked_for_end_the_run(tmp_path: Path) -> None:
    ended = fit(tmp_path / "run", "continue", "2:forward:4", least_ranks=4)
    assert ended.outcome.returncode == 137, ended.outcome.output
    assert "3 ranks left, and least_ranks=4" in ended.outcome.stderr
    assert ended.outcome.leftovers == ()


def test_an_exception_ends_the_run_as_ever(tmp_path: Path) -> None:
    ended = fit(tmp_path / "run", "continue", "all:raise:0")
    assert ended.outcome.returncode == 1, ended.outcome.output
    assert "ValueError: boom" in ended.outcome.stderr and not ended.lost()
    assert ended.outcome.leftovers == ()
