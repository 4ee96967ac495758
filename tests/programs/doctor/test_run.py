"""Run folders that the doctor reads: of real runs, and of files that somebody has damaged."""

from __future__ import annotations

import json
import os
import shlex
import zipfile
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_lockstep._application.checks import find_checkpoint
from lightning_lockstep.doctor.checks.run import check
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions, Finding, Status
from tests.harness import run_script
from tests.models.application.command_lines import TRAIN

SMALL = "data=source_text model=byte_gpt data.max_bytes=60000 trainer.accelerator=cpu test=false trainer.max_steps=4"
TWO = "trainer.devices=2 trainer.num_sanity_val_steps=0"


def findings(folder: Path) -> list[Finding]:
    return list(check(Machine(), CheckOptions(folders=(str(folder),))))


@pytest.mark.parametrize(
    ("arguments", "status", "subject", "told"),
    [
        (
            f"{TWO} callbacks=overflow model.learning_rate=1e30",
            Status.PROBLEM,
            "overflow",
            "Detected inf/nan during batch_number=",
        ),
        (
            f"{TWO} model._target_=tests.models.doctor.faulty_models.Stalls strategy.stall_timeout=2",
            Status.PROBLEM,
            "collective guard",
            "rank 1 never came to collective",
        ),
        (
            "trainer.devices=1 callbacks=stop_together callbacks.stop_together.stop_file=stop",
            Status.OK,
            "run",
            "all ranks left it together and saved last.ckpt: rank 0: found the stop file",
        ),
        (
            "model._target_=tests.models.doctor.faulty_models.Raises",
            Status.PROBLEM,
            "failure",
            "stage setup: RuntimeError: no file of weights",
        ),
    ],
    ids=["overflow", "stalled", "preempted", "not made"],
)
def test_real_runs(arguments: str, status: Status, subject: str, told: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "stop").touch()
    outcome = run_script([*TRAIN, *SMALL.split(), *arguments.split(), f"hydra.run.dir={folder}"], timeout=120)
    assert not outcome.timed_out and outcome.returncode != 0, outcome.output
    found = findings(folder)
    assert (found[0].status, found[0].subject) == (status, subject), found
    assert told in found[0].evidence and not found[0].fix, found
    assert all(finding.status is not Status.PROBLEM for finding in found[1:]), found


def test_a_search_for_a_batch_size_is_told(tmp_path: Path) -> None:
    content = {
        "size": 24,
        "accumulate": 2,
        "ranks": 4,
        "reason": "the limit is found",
    }
    (tmp_path / "batch_size.json").write_text(json.dumps(content))
    [size] = [finding for finding in findings(tmp_path) if finding.subject == "batch size"]
    assert "24 per rank x 2 accumulated x 4 ranks (the limit is found)" in size.evidence


def test_the_runs_of_a_script_are_found_below_its_folder_and_need_no_summary(tmp_path: Path) -> None:
    for version in range(3):
        folder = tmp_path / "lightning_logs" / f"version_{version}"
        folder.mkdir(parents=True)
        (folder / "hparams.yaml").write_text("{}")
        os.utime(folder / "hparams.yaml", (1, 1))
    [run_of_script, *_] = findings(folder)
    assert run_of_script.status is Status.OK and "no failure was recorded" in run_of_script.evidence
    [found] = findings(tmp_path)
    assert found.status is Status.OK and "3 run folders below it; none of these runs has failed" in found.evidence
    record = {"rank": 1, "world_size": 2, "host": "h", "summary": "ValueError: boom", "where": {"step": 7}}
    own = '  File "/me/train.py", line 9, in step\n    raise ValueError\n'
    trace = f"Traceback:\n{own}ValueError: boom\n"
    (folder / "failure.json").write_text(json.dumps(record | {"traceback": trace}))
    [found] = findings(tmp_path)
    assert found.fix == (f"lockstep-doctor run {folder}",)
    [failed, *_] = findings(folder)
    assert failed.status is Status.PROBLEM and "rank 1 of 2 on h, step 7: ValueError: boom" in failed.evidence
    assert failed.evidence.endswith(trace.strip()) and not failed.fix
    ours = {
        "summary": "BatchSizeError: none fits",
        "traceback": "lightning_lockstep.errors.BatchSizeError: none\nhere",
    }
    (folder / "failure.json").write_text(json.dumps(record | ours))
    assert findings(folder)[0].evidence.endswith("step 7: BatchSizeError: none\nhere"), "all of its message"


def test_a_run_that_left_nothing_can_go_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "x=[1,2] y"
    (folder / "checkpoints").mkdir(parents=True)
    for number, name in enumerate(("best.ckpt", "preempted.ckpt")):
        with zipfile.ZipFile(folder / "checkpoints" / name, "w") as archive:
            archive.writestr("archive/data.pkl", "optimizer_states")
        os.utime(folder / "checkpoints" / name, (number, number))
    (folder / ".hydra").mkdir()
    record = {
        "job": {"name": "train", "config_name": "mine"},
        "overrides": {"hydra": ["hydra.run.dir=x"], "task": ["seed=3", "ckpt_path=auto"]},
        "runtime": {
            "config_sources": [
                {"provider": "main", "path": "lightning_lockstep.conf"},
                {"provider": "command-line", "path": "/my conf"},
            ]
        },
    }
    (folder / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": record}))
    half = (folder / "checkpoints" / "best.ckpt").read_bytes()[:20]
    (folder / "checkpoints" / "last.ckpt").write_bytes(half)  # it was killed while it wrote this
    found = {finding.subject: finding for finding in findings(folder)}
    assert found["run"].status is Status.WARNING and " ago: it still runs, it was" in found["run"].evidence
    [command] = found["checkpoints"].fix
    *start, override = shlex.split(command)
    assert start == ["lockstep-train", "--config-dir", "/my conf", "--config-name", "mine", "seed=3"]
    [read] = OverridesParser.create().parse_overrides([override])
    assert read.get_key_element() == "ckpt_path"
    path = read.value()
    assert find_checkpoint(str(path), run_folder=tmp_path, started_in=tmp_path) == str(
        folder / "checkpoints" / "preempted.ckpt"
    )
    record["job"]["name"] = "own_program"  # type: ignore[index]
    (folder / ".hydra" / "hydra.yaml").write_text(json.dumps({"hydra": record}))
    (folder / "checkpoints" / "last.ckpt").unlink()
    found = {finding.subject: finding for finding in findings(folder)}
    [line] = found["checkpoints"].fix
    assert line == f'# in the script: trainer.fit(..., ckpt_path="{folder}/checkpoints/preempted.ckpt")'
    (folder / ".begun").touch()  # by `prepare_training`
    found = {finding.subject: finding for finding in findings(folder)}
    assert found["checkpoints"].fix[0].startswith("# the command of the run once more, with ckpt_path=")


def test_a_rank_that_was_killed_is_not_said_to_be_out_of_memory(tmp_path: Path) -> None:
    record = {"rank": 1, "world_size": 2, "host": "h", "summary": "killed by SIGKILL"}
    (tmp_path / "failure.json").write_text(json.dumps(record))
    [killed] = [finding for finding in findings(tmp_path) if finding.status is Status.PROBLEM]
    assert killed.subject == "killed" and "a scheduler (at a limit)" in killed.evidence
    assert "sacct -j JOB" in killed.fix[0]


def test_ranks_that_were_killed_while_the_others_went_on_are_named(tmp_path: Path) -> None:
    told = "rank 2 was lost at epoch 0, step 4 (SIGKILL); went on with 3 ranks after 0.2 s; no step was lost"
    (tmp_path / "lost.json").write_text(json.dumps({"lost": [{"ranks": [2], "text": told}]}))
    [lost] = [finding for finding in findings(tmp_path) if finding.subject == "lost rank"]
    assert lost.status is Status.WARNING and lost.evidence.endswith(told)


def test_a_collective_that_did_not_complete_is_quoted_and_a_record_cut_short_is_named(tmp_path: Path) -> None:
    text = "rank 1 never came to collective 7"
    record = {"rank": 0, "world_size": 2, "host": "h", "summary": f"CollectiveStallError: {text}"}
    record["traceback"] = (
        f"lightning_lockstep.errors.CollectiveStallError: {text}\nStack of rank 0:\n{'x' * 1_100_000}\n\nLook."
    )
    (tmp_path / "failure.json").write_text(json.dumps(record))
    [guard] = [finding for finding in findings(tmp_path) if finding.status is Status.PROBLEM]
    assert guard.subject == "collective guard" and guard.evidence.endswith(f"CollectiveStallError: {text}\nLook.")
    (tmp_path / "failure.json").write_text('{"rank": 1, "summary": "RuntimeErr')
    [cut] = [finding for finding in findings(tmp_path) if finding.status is Status.PROBLEM]
    assert cut.subject == "records" and "failure.json cannot be read" in cut.evidence
    assert not any("it was killed" in finding.evidence for finding in findings(tmp_path))


def test_a_report_of_overflow_is_quoted_with_its_remedy_whatever_the_folder_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "x=[1,2]"
    (folder / "overflow").mkdir(parents=True)
    (folder / "overflow" / "batch-3.json").write_text("{}")
    quoted = [
        "Detected inf/nan during batch_number=3 (epoch 0): a loss is nan.",
        "Producer: block.1 made the first inf.",
        "Remedy (the batch was run again this way and passed):",
        "    on the command line:  'callbacks.fp32_modules.modules=[block.1]'",
        "Advice: clip gradients.",
    ]
    frames = ["--- rank 0 on host h", "Last 2 forward frames:", "1.0e+00 2.0e+00 weight"]
    (folder / "overflow" / "batch-3.txt").write_text("\n".join([quoted[0], *frames, *quoted[1:]]))
    [overflow] = [finding for finding in findings(folder) if finding.status is Status.PROBLEM]
    quoted.append(f"Full report: '{folder}/overflow/batch-3.txt'")
    assert overflow.evidence == f"{folder}: " + "\n".join(quoted) and not overflow.fix


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("a_folder", "it has none of a run's files"),
        ("a_file", "it has none of a run's files"),
        ("none", "there is no such folder"),
    ],
)
def test_what_is_no_run_folder_gets_no_verdict(place: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a_folder" / "etc").mkdir(parents=True)
    (tmp_path / "a_file").write_text("127.0.0.1 localhost")
    [found] = findings(tmp_path / place)
    assert found.status is Status.PROBLEM and told in found.evidence


def test_the_folder_of_a_sweep_points_to_its_jobs(tmp_path: Path) -> None:
    for job in range(11):
        (tmp_path / str(job) / ".hydra").mkdir(parents=True)
        (tmp_path / str(job) / ("failure.json" if job in (2, 10) else "summary.json")).write_text("{}")
    [found] = findings(tmp_path)
    assert found.status is Status.PROBLEM and "11 run folders below it" in found.evidence
    assert found.fix == (f"lockstep-doctor run {tmp_path}/2 {tmp_path}/10",)
    for job in (2, 10):
        (tmp_path / str(job) / "summary.json").write_text("{}")
    assert findings(tmp_path)[0].status is Status.OK


@pytest.mark.parametrize("content", ["", "null", "[1]", '"text"', "{", '{"ranks": 3}', '{"text": null, "trials": 1}'])
def test_damaged_files_are_read_without_an_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "overflow").mkdir()
    for name in (
        "failure.json",
        "summary.json",
        "batch_size.json",
        "overflow/batch-1.json",
    ):
        (tmp_path / name).write_text(content)
    assert findings(tmp_path)


def test_a_metric_that_is_not_finite_is_a_problem_of_a_finished_run(tmp_path: Path) -> None:
    summary = {"steps": 4, "ranks": 1, "metrics": {"loss": "nan", "val_loss": 2.5}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    [finished, metrics] = findings(tmp_path)
    assert finished.status is Status.OK and "loss nan, val_loss 2.5" in finished.evidence
    assert metrics.status is Status.PROBLEM and metrics.evidence.endswith("loss is not finite")
    assert metrics.fix[1] == "lockstep-train debug=overflow ..."
