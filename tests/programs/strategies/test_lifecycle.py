"""The life cycle by composition: a strategy that does not inherit from DDP gets all of it, on two real ranks."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.plugins.precision import Precision

from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher
from tests.common.strategies.own_strategy import AveragingStrategy
from tests.helpers import COMMON, ScriptOutcome, run_script

SCRIPT = COMMON / "strategies" / "own_strategy.py"


@pytest.fixture(scope="module")
def done() -> ScriptOutcome:
    """A program of several fits, in the last of which a rank raises."""
    done = run_script([sys.executable, SCRIPT, "fit", "truncate", "join", "error", "raise"], timeout=280)
    assert not done.timed_out
    return done


def test_a_strategy_without_ddp_has_launched_ranks_threads_the_table_and_uneven_inputs(
    done: ScriptOutcome,
) -> None:
    found = re.findall(
        r"^(\w+): rank (\d) of 2 threads 1 steps (\d+) batches (\d+) weight (\S+)$", done.stdout, re.M
    )
    cases = {(case, int(rank)): (int(steps), int(batches)) for case, rank, steps, batches, _ in found}
    assert cases == {
        (case, rank): (steps, steps)
        for case, steps in (("fit", 6), ("truncate", 4), ("join", 6))
        for rank in (0, 1)
    }, done.output
    weights = {case: {weight for each, *_, weight in found if each == case} for case, *_ in found}
    assert all(len(of_ranks) == 1 for of_ranks in weights.values()), "the ranks ended with different weights"
    assert weights["join"] != weights["truncate"] != weights["fit"]
    for rank in (0, 1):
        assert f"error: rank {rank} caught ConfigurationError" in done.stdout
    assert done.stdout.count("(rank 0: 6, rank 1: 4)") == 2, "the error is the same on every rank"
    assert done.output.count("2 ranks") == 1, "the placement table is shown once"


def test_a_failing_rank_of_a_strategy_without_ddp_ends_both_with_its_traceback_last(
    done: ScriptOutcome,
) -> None:
    assert done.leftovers == ()
    assert done.returncode not in (0, None)
    assert "raise: rank 0 caught RankFailedError" in done.stdout
    assert "lightning-lockstep: rank 1 of 2" in done.stderr
    assert re.search(
        r"ValueError: boom in training_step\nSaved to .*failure\.json; .*$", done.stderr.rstrip()
    )


class GPUPrecision(Precision):
    precision = "transformer-engine"  # type: ignore[assignment]


def test_a_strategy_without_ddp_resolves_the_precision_before_any_rank_is_started() -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False}
    with pytest.raises(ConfigurationError, match="precision='transformer-engine'"):
        L.Trainer(strategy=AveragingStrategy(), plugins=[GPUPrecision()], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning says that it will use bf16
        trainer = L.Trainer(strategy=AveragingStrategy(), precision="16-mixed", **options)
    assert trainer.precision == "16-mixed"


def test_a_strategy_without_ddp_has_the_launcher_of_its_start_method() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=AveragingStrategy(), logger=False)
    assert isinstance(trainer.strategy.launcher, ScriptLauncher)
    spawned = L.Trainer(
        accelerator="cpu", devices=2, strategy=AveragingStrategy(start_method="spawn"), logger=False
    )
    assert type(spawned.strategy.launcher).__name__ == "SpawnedLauncher"
