"""Scripts as users start them: what is left when a rank fails. Other ways of starting: test_ways_of_starting.py."""

from __future__ import annotations

import json
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_lockstep import LockstepDDPStrategy
from tests.harness import reserve_port, run_ranks, run_script, start_script
from tests.models.strategies.failures import LIMIT, SAVED, SCRIPT, check_kept, last_lines, run


def test_a_raising_rank_ends_the_job_with_its_traceback_last(tmp_path: Path) -> None:
    """Also while both ranks log as fast as they can. The last line names the file in which it is kept."""
    outcome = run("flood@1", folder=tmp_path)
    assert outcome.returncode == 1
    assert outcome.stderr.count("ValueError: boom in training_step") <= 4
    assert outcome.stderr.rstrip().endswith(f"ValueError: boom in training_step\n{SAVED}")
    check_kept(tmp_path, 1, "ValueError: boom in training_step")
    headline = re.search(r"lightning-lockstep: rank 1 of 2 \(host .*\) failed at (.*): ValueError", outcome.stderr)
    assert headline is not None, outcome.stderr
    assert headline[1] == "epoch 0, step 5, batch 5, stage train, in training_step"
    assert outcome.stdout.count("caught RankFailedError") == 1


def test_the_others_do_not_wait_in_a_collective_for_the_first_rank_that_has_raised(tmp_path: Path) -> None:
    """With a grace period of ten minutes: the connections end as they do when another rank does."""
    outcome = run("raise@0", folder=tmp_path)
    assert outcome.returncode == 1
    assert outcome.stderr.rstrip().endswith(f"ValueError: boom in training_step\n{SAVED}")
    check_kept(tmp_path, 0, "ValueError: boom in training_step")


def test_ranks_end_when_the_started_process_is_killed(tmp_path: Path) -> None:
    with start_script([str(SCRIPT), "endless", "popen"], cwd=tmp_path) as script:
        script.wait_for("trains", timeout=LIMIT)
        script.send_signal(signal.SIGKILL)
        outcome = script.finish(LIMIT, settle=30)
    assert outcome.leftovers == (), outcome.output


def test_a_rank_that_still_works_is_waited_for() -> None:
    """After three fits, each with a process group of its own on the same store; it fails, and so does the job."""
    outcome = run("late-fails")
    assert outcome.returncode == 3, outcome.output
    assert outcome.stdout.count("fitted") == 2
    assert "rank 1 has written its predictions" in outcome.stdout
    assert re.search(r"rank 1 of 2 .* ended.*: exit code 3", outcome.stderr)


class Ends(BoringModel):
    """Raises in its third step."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.error is not None:
            raise self.error
        return super().training_step(batch, batch_idx)


def ends_of_one_rank(folder: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Return the name of each file that is left after a run, and what it says, as one program fits again and again."""
    found = []
    for error in (ValueError("boom"), None, SystemExit(0), KeyboardInterrupt()):
        logger = CSVLogger(folder, version=0)
        options = {"logger": logger, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(accelerator="cpu", devices=1, strategy=LockstepDDPStrategy(), max_steps=4, **options)
        with suppress(ValueError, SystemExit):
            trainer.fit(Ends(error))
        left = [(file.relative_to(folder), json.loads(file.read_text())) for file in folder.rglob("failure.json")]
        found += [(str(file), record["summary"], record["where"]) for file, record in left] or [("", "", {})]
    return found


def test_a_run_of_one_rank_keeps_its_failure_in_the_folder_of_its_logger(tmp_path: Path) -> None:
    """The next run in that folder removes it; a program that ends on purpose has none."""
    [found] = run_ranks(1, ends_of_one_rank, tmp_path, backend=None)
    file, place = (
        "lightning_logs/version_0/failure.json",
        {"epoch": 0, "step": 2, "batch": 2, "stage": "train"},
    )
    assert found == [
        (file, "ValueError: boom", {**place, "in": "training_step"}),
        ("", "", {}),
        ("", "", {}),
        (file, "KeyboardInterrupt", {**place, "in": "training_step"}),
    ]


def test_a_rank_that_ends_before_all_have_met_ends_the_job() -> None:
    outcome = run("early")
    assert outcome.returncode == 1
    assert "RuntimeError: boom before the ranks met" in outcome.stderr
    assert "rank 1" in last_lines(outcome.stderr, 1)
    assert "ended before all ranks had met: exit code 1" in last_lines(outcome.stderr, 1)
    outcome = run("leaves")  # by sys.exit(0), as after a test of the rank in the program
    assert outcome.returncode == 1
    assert "ended before all ranks had met: exit code 0" in last_lines(outcome.stderr, 1)
    assert "Every rank has to make the same Trainer" in last_lines(outcome.stderr, 1)


def test_a_rank_whose_starter_is_gone_before_they_met_ends_too() -> None:
    outcome = run("orphan")
    assert outcome.returncode == -signal.SIGTERM
    assert "the process that started this rank has exited" in last_lines(outcome.stderr, 1)


def test_two_nodes_started_by_hand() -> None:
    with reserve_port() as port:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with start_script([str(SCRIPT), "nodes"], env={**common, "NODE_RANK": "0"}) as first:
            second = run_script([str(SCRIPT), "nodes"], env={**common, "NODE_RANK": "1"}, timeout=LIMIT)
            outcome = first.finish(LIMIT)
    assert (outcome.returncode, second.returncode) == (0, 0), outcome.output + second.output
    assert re.findall(r"rank 0 fitted (\S+)", outcome.stdout) == re.findall(r"rank 1 fitted (\S+)", second.stdout)


def test_a_rank_out_of_memory_ends_the_job() -> None:
    outcome = run("memory@1")
    assert outcome.returncode == 1
    assert "DefaultCPUAllocator" in last_lines(outcome.stderr, 3)
