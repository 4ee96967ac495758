"""The collective guard in scripts as users start them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, SupervisorSettings
from tests.common.distributed.mpi.launch import mpi_environ, why_no
from tests.helpers import COMMON, ScriptOutcome, run_script

SCRIPT = COMMON / "strategies" / "guard_script.py"
LIMIT = 120.0  # only so that a hang ends the test


def run(tmp_path: Path, case: str, start: str = "popen", *options: str) -> ScriptOutcome:
    environ = {"TORCH_FR_BUFFER_SIZE": "0"} if case == "blind" else None
    return ended(run_script([str(SCRIPT), case, str(tmp_path), start, *options], timeout=LIMIT, env=environ))


def ended(outcome: ScriptOutcome) -> ScriptOutcome:
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), f"no rank is left behind: {outcome.output}"
    return outcome


def rows(text: str) -> list[str]:
    """Return the rows of the last table of a report, without padding."""
    return [re.sub(r"\s+", " ", row).strip() for row in re.findall(r"^  +[01]  .*$", text, re.MULTILINE)][-2:]


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
    report = json.loads((tmp_path / "guard-report.json").read_text())
    assert report["error"] == "CollectiveMismatchError"
    assert report["text"] in outcome.stderr and [rank["rank"] for rank in report["ranks"]] == [0, 1]


def check_kept(outcome: ScriptOutcome, folder: Path, summary: str) -> None:
    """Check that the error is in a file, and that the last line names that."""
    record = json.loads((folder / "failure.json").read_text())
    assert record["summary"].startswith(summary), record
    assert outcome.stderr.rstrip().splitlines()[-1] == (
        f"Saved to {folder}/failure.json; for what it says and what to do next: lockstep-doctor run {folder}"
    ), outcome.stderr


@pytest.mark.parametrize(
    ("case", "start", "expected"),
    [
        (
            "operations",
            "spawn",
            (r"0 all_reduce\(sum\) float32 \(4,\) .* in part_ways", r"1 broadcast from 0 .* <- differs"),
        ),
        ("roots", "fork", (r"0 broadcast from 0 float32", r"1 broadcast from 1 float32 .* <- differs")),
        ("messages", "popen", (r"0 receive from 1 .* in part_ways", r"1 receive from 0 .* in part_ways")),
        ("caught", "popen", (r"0 all_reduce float32 \(4,\)", r"1 all_reduce float32 \(40,\) backward")),
        # A rank that leaves a layer out gathers one part less.
        ("unused", "fsdp", (r"0 all_gather float32 \(10,\)", r"1 all_reduce float32 .* <- differs")),
        # One that calls a layer alone, to log, gathers one part more.
        ("alone", "fsdp", (r"0 all_gather float32 .* backward", r"1 all_reduce float32 .* <- differs")),
    ],
)
def test_ranks_that_call_different_things_raise_the_same(
    tmp_path: Path, case: str, start: str, expected: tuple[str, str]
) -> None:
    outcome = run(tmp_path, case, start)
    assert outcome.returncode == 1, outcome.output
    for found, wanted in zip(rows(outcome.stderr), expected, strict=True):
        assert re.match(wanted, found), outcome.stderr
    divided = "FSDP has divided the model, so each call of a layer is an all_gather" in outcome.stderr
    assert divided == (start == "fsdp"), outcome.stderr
    check_kept(outcome, tmp_path, "CollectiveMismatchError: ranks disagree on")
    if case == "messages":
        assert all(f"rank {rank} raises CollectiveMismatchError" in outcome.stdout for rank in (0, 1))


def test_a_rank_that_leaves_a_layer_out_gets_the_error_of_ddp(tmp_path: Path) -> None:
    """The other one waits for its gradients; DDP says at the next step which parameters were not used."""
    outcome = run(tmp_path, "unused")
    assert outcome.returncode == 1, outcome.output
    assert "rank 1 raises RuntimeError" in outcome.stdout
    assert "rank 0 raises RankFailedError" in outcome.stdout
    assert "Parameter indices which did not receive grad for rank 1: 2 3" in outcome.stderr
    assert "Collective" not in outcome.stderr


@pytest.mark.parametrize(
    ("case", "start", "place"),
    [
        ("sleep", "popen", r"guard_script.py:\d+ in keep_waiting"),
        ("loader", "popen", r"\w+.py:\d+ in \w+"),
        ("sleep", "fsdp", r"guard_script.py:\d+ in keep_waiting"),
    ],
)
def test_a_rank_that_never_comes_is_named_with_its_place(
    tmp_path: Path, case: str, start: str, place: str
) -> None:
    outcome = run(tmp_path, case, start)
    check_stall(outcome, place)
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to collective #")


@pytest.mark.mpi
@pytest.mark.skipif(bool(why_no("open_mpi")), reason=str(why_no("open_mpi")))
def test_a_rank_that_never_comes_over_mpi_is_named_with_its_place(tmp_path: Path) -> None:
    script = [str(SCRIPT), "sleep", str(tmp_path), "mpi"]
    outcome = ended(run_script(script, timeout=LIMIT, env=mpi_environ()))
    check_stall(outcome, r"guard_script.py:\d+ in keep_waiting")
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to collective #")


def check_stall(outcome: ScriptOutcome, place: str) -> None:
    assert outcome.returncode == 1, outcome.output
    assert "CollectiveStallError: rank 1 never came to collective #" in outcome.stderr
    assert all(f"rank {rank} raises CollectiveStallError" in outcome.stdout for rank in (0, 1))
    assert re.search(rf"1 +- +{place}, after #\d+ all_reduce.*<- never came", outcome.stderr), outcome.stderr
    assert re.search(
        r"^(\[rank 0\] )?Ranks? 0.* at epoch 0, step \d, batch \d, stage train", outcome.stderr, re.MULTILINE
    )
    assert 'guard="verify"' not in outcome.stderr, "it finds no rank that never comes"
    assert "Stack of rank 1 (innermost frame last)" in outcome.stderr
    # The user's files by their whole paths; what libraries do between is one line.
    assert re.search(rf'File "{re.escape(str(SCRIPT))}", line \d+, in \w+$', outcome.stderr, re.MULTILINE)
    assert re.search(r"\.\.\. \d+ frames of lightning, .*torch", outcome.stderr), outcome.stderr


@pytest.mark.parametrize("start", ["popen", "fsdp"])
def test_a_stopped_process_is_named(start: str, tmp_path: Path) -> None:
    outcome = run(tmp_path, "stop", start, "grace_period=2.0")
    assert outcome.returncode != 0
    *_, killed, _, last, _ = outcome.stderr.rstrip().splitlines()
    check_kept(outcome, tmp_path, "CollectiveStallError: rank 1 never came to")
    assert killed == "lightning-lockstep: killed rank 1 of this host, which did not end within 2 s."
    assert re.match(r"rank 0 of 2 \(host .*\) failed at .*: CollectiveStallError: rank 1 never came to", last)
    assert re.search(
        r"1 +- +no answer: its process \d+ is stopped, by a signal .*<- never came", outcome.stderr
    )


def test_a_rank_that_works_is_a_remark_and_no_error(tmp_path: Path) -> None:
    outcome = run(tmp_path, "busy")
    assert outcome.returncode == 0, outcome.output
    assert re.search(
        r"rank 0 has waited \d+ s in collective #\d+ of group 'world' .* rank 1 is still running, at",
        outcome.output,
    )
    assert not (tmp_path / "guard-report.json").exists()


def test_a_job_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    outcome = run(tmp_path, "pause")
    assert outcome.returncode == 0, outcome.output
    assert "never came" not in outcome.output


def test_what_is_not_seen_is_said_once(tmp_path: Path) -> None:
    outcome = run(tmp_path, "blind")
    assert outcome.output.count("guard='watch' does not see the all_reduce that rank 0 waits in") == 1, (
        outcome.output
    )
    assert "TORCH_FR_BUFFER_SIZE=0" in outcome.output


def test_the_history_is_listed_on_request(tmp_path: Path) -> None:
    outcome = run(tmp_path, "sleep", "popen", "guard_history=3")
    assert "The last 3 collectives of each rank" in outcome.stderr
    assert len(re.findall(r"^ +[01] +#\d+ +world +[a-z_]+ ", outcome.stderr, re.MULTILINE)) == 6


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
    assert supervisor._folder() == tmp_path / "logs"
    for folder, expected in ((tmp_path, tmp_path), (tmp_path / "other", tmp_path / "logs")):
        hydra = {"runtime": {"output_dir": str(folder)}, "job": {"num": 0}}
        monkeypatch.setattr(HydraConfig.instance(), "cfg", OmegaConf.create({"hydra": hydra}))
        supervisor = RankSupervisor(SupervisorSettings())  # of a strategy that was made in this job
        supervisor._trainer = lambda: trainer
        monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # as in a spawned rank
        assert supervisor._folder() == expected
