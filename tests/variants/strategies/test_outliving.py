"""A run outlives its ranks: rank 0, another or two at once are killed in each phase of a fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import run_script
from tests.models.strategies.outliving import SCRIPT, WITH_ALL, Fit, check_same, fit

EXAMPLES = SCRIPT.parents[3] / "examples"
# Fits of three epochs of 13 steps; each is one launch, from four ranks to one or two.
FITS: dict[str, tuple[str, ...]] = {
    "rank 0, another, the last": ("0:backward:4", "2:validation:13", "3:save:20"),
    "rank 0 in hooks": ("0:save:10", "1:validation_end:13", "2:epoch_end:26"),
    "two at once in a step": ("0:backward:8", "3:forward:8"),
    "two at once in a validation": ("1:validation:26", "2:validation:26"),
    "rank 0 as it begins": ("0:connect:0", "1:sanity:0", "2:optimizer:20"),
    "while the others recover": ("2:backward:8", "3:recovery:1", "0:connect:2"),
    "at the end of the last epoch": ("0:epoch_end:39",),
    "after it": ("1:train_end:39", "2:train_end:39"),
    "rank 0 after it": ("0:train_end:39",),
}
OPTIONS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "global batch": ({"global_batch": 31}, ("0:backward:3", "1:save:7")),
    "accumulation": ({"accumulate_grad_batches": 3}, ("0:backward:3", "1:forward:6")),
    "validation within an epoch": ({"val_check_interval": 0.25}, ("0:save:9", "2:validation:18")),
    "validation in every second epoch": (
        {"check_val_every_n_epoch": 2},
        ("1:epoch_end:13", "0:epoch_end:26"),
    ),
    "validation every five batches": ({"val_check_interval": 5}, ("0:backward:6", "1:validation:10")),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    return fit(tmp_path_factory.mktemp("whole") / "run", "end")


@pytest.mark.parametrize("case", FITS)
def test_nothing_of_a_loss_is_seen_in_what_is_left(case: str, undisturbed: Fit, tmp_path: Path) -> None:
    disturbed = fit(tmp_path / "run", "continue", *FITS[case])
    check_same(disturbed, undisturbed)
    assert len(disturbed.weights()) == 4 - len(FITS[case])


@pytest.mark.parametrize("case", OPTIONS)
def test_nor_with_other_counts_of_batches(case: str, tmp_path: Path) -> None:
    options, orders = OPTIONS[case]
    check_same(fit(tmp_path / "lost", "continue", *orders, **options), fit(tmp_path / "whole", "end", **options))


def test_workers_of_a_lost_rank_hold_nobody_up(
    undisturbed: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "2")
    check_same(fit(tmp_path / "run", "continue", "2:backward:8", "0:forward:20"), undisturbed)


def test_nor_with_all_callbacks_loggers_workers_and_numbers_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORKERS", "2")
    orders = ("2:backward:4", "0:save:5", "3:validation:7")  # an epoch has 7 steps
    check_same(
        fit(tmp_path / "lost", "continue", *orders, spares=1, max_epochs=2, **WITH_ALL),
        fit(tmp_path / "whole", "end", max_epochs=2, **WITH_ALL),
    )


def test_the_example_ends_with_the_loss_of_a_run_without_kills(tmp_path: Path) -> None:
    losses = []
    for kills in ("2@10,0@20,3@30", ""):
        outcome = run_script([str(EXAMPLES / "kill_a_rank.py")], env={"KILLS": kills}, cwd=tmp_path, timeout=240)
        assert outcome.returncode == 0, outcome.output
        losses += re.findall(r"48 steps, now on . rank\(s\); (loss .*)", outcome.stdout)
    assert len(losses) == 2 and losses[0] == losses[1]
