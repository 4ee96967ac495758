"""The collective guard in scripts as users start them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.harness import start_script
from tests.models.strategies.guard import (
    LIMIT,
    SCRIPT,
    check_different,
    check_kept,
    check_stall,
    ended,
    rows,
    run,
)


def test_ranks_that_gather_different_shapes_get_one_report(tmp_path: Path) -> None:
    """gloo ends one of the two processes over it; the guard has the last word there."""
    outcome = run(tmp_path, "shapes")
    assert outcome.returncode == 1, outcome.output
    assert "CollectiveMismatchError: ranks disagree on collective #" in outcome.stderr
    assert "lightning_lockstep.gather_uneven()" in outcome.stderr
    first, second = rows(outcome.stderr)
    assert re.match(r"0 all_gather float32 \(1, 5\) guard_script.py:\d+ in part_ways", first)
    assert re.match(r"1 all_gather float32 \(1, 2, 5\) guard_script.py:\d+ in part_ways <- differs", second)
    assert "Ranks 0-1 are at epoch 0, step 3, batch 3, stage train." in outcome.stderr
    assert 'With guard="verify" (or LOCKSTEP_DEBUG=1) the ranks compare' in outcome.stderr
    check_kept(outcome, tmp_path, "CollectiveMismatchError: ranks disagree on collective #")


def test_a_rank_that_leaves_a_layer_out_under_fsdp_gathers_one_part_less(tmp_path: Path) -> None:
    expected = (r"0 all_gather float32 \(10,\)", r"1 all_reduce float32 .* <- differs")
    check_different(tmp_path, "unused", "fsdp", expected)


def test_a_rank_that_never_comes_is_named_with_its_place(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sleep", "popen")
    check_stall(outcome, r"guard_script.py:\d+ in keep_waiting")
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to collective #")


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    outcome = run(tmp_path, "stop", "popen", "grace_period=2.0")
    assert outcome.returncode != 0
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to")
    assert re.search(
        r"1 +- +no answer: its process \d+ is stopped, by a signal .*<- never came", outcome.stderr
    )


def test_a_rank_that_works_is_a_remark_and_no_error(tmp_path: Path) -> None:
    remark = r"rank 0 has waited \d+ s in collective #\d+ of group 'world' .* rank 1 is still running, at"
    with start_script([str(SCRIPT), "busy", str(tmp_path), "popen"]) as script:
        script.wait_for(remark, timeout=LIMIT)
        (tmp_path / "go").touch()
        outcome = ended(script.finish(LIMIT))
    assert outcome.returncode == 0, outcome.output
    assert not (tmp_path / "failure.json").exists()


def test_the_report_goes_to_the_run_folder_of_hydra_where_that_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = SimpleNamespace(save_dir=str(tmp_path / "logs"))
    supervisor = RankSupervisor(SupervisorSettings())
    trainer = SimpleNamespace(
        default_root_dir=os.getcwd(), logger=logger, fast_dev_run=False, is_global_zero=True
    )
    supervisor._trainer = lambda: trainer
    assert supervisor.folder() == tmp_path / "logs"
    for folder, expected in ((tmp_path, tmp_path), (tmp_path / "other", tmp_path / "logs")):
        hydra = {"runtime": {"output_dir": str(folder)}, "job": {"num": 0}}
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydra}))
        supervisor = RankSupervisor(SupervisorSettings())  # of a strategy that was made in this job
        supervisor._trainer = lambda: trainer
        monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as in a spawned rank
        assert supervisor.folder() == expected


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    outcome = run(tmp_path, "pause")
    assert outcome.returncode == 0, outcome.output
    assert "never came" not in outcome.output
