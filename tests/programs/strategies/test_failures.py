"""Scripts as users start them: what is left when a rank fails."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep.distributed import FailureRecord
from lightning_lockstep.distributed.failure.record import place_in_words
from lightning_lockstep.doctor.checks.run import run as doctor_run
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions, Status
from tests.common.distributed.mpi.launch import mpi_environ, why_no
from tests.helpers import COMMON, Script, ScriptOutcome, reserve_port, run_ranks, run_script, start_script
from tests.helpers.cluster import Cluster, why_not

SCRIPT = COMMON / "strategies" / "fit_script.py"
# A rank's line of dashes is shown before what the rank prints next, not held back for a remark of mpirun's.
DASHES_PASS = r"\[rank 0\] -{60}\n(?:\[rank 1\].*\n)*\[rank 0\] rank 0 trains"
LIMIT = 120.0  # only so that a hang ends the test


def run(*args: str, folder: Path | None = None) -> ScriptOutcome:
    outcome = run_script([str(SCRIPT), *args], timeout=LIMIT, cwd=folder)
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), f"no rank is left behind: {outcome.output}"
    return outcome


def last_lines(text: str, number: int = 12) -> str:
    return "\n".join(text.rstrip().splitlines()[-number:])


SAVED = "Saved to ./failure.json; for what it says and what to do next: lockstep-doctor run ."


def check_kept(
    folder: Path, rank: int, summary: str, *, place: str = "epoch 0, step 5, batch 5, stage train"
) -> None:
    """Check what a failed run has left in its folder, and that the doctor reads it."""
    record = FailureRecord.from_json((folder / "failure.json").read_text())
    assert (record.rank, record.world_size) == (rank, 2) and summary in record.summary
    assert place_in_words(record.where).startswith(place), record
    found = list(doctor_run(Machine(), CheckOptions(folders=(str(folder),))))
    [problem] = [one for one in found if one.status is Status.PROBLEM]
    assert (
        f"rank {rank} of 2" in problem.evidence and summary in problem.evidence and place in problem.evidence
    )


def test_two_trainers_in_one_script_share_the_ranks(tmp_path: Path) -> None:
    earlier = FailureRecord(1, 2, "node7", 3, "exception", "ValueError: of an earlier run")
    (tmp_path / "failure.json").write_text(earlier.to_json())
    outcome = run("none", folder=tmp_path)
    assert not list(tmp_path.iterdir()), "the earlier run's record is gone, and this one has not failed"
    assert outcome.returncode == 0, outcome.output
    lines = outcome.stdout.split("\n")
    for word in ("fitted", "validated"):
        values = [line.split()[-1] for line in lines if word in line]
        assert len(values) == 2, outcome.stdout
        assert len(set(values)) == 1
    assert outcome.stderr.count("2 ranks") == 1, "the placement is shown once"


@pytest.mark.parametrize(("fault", "rank"), [("raise@0", 0), ("flood@1", 1)])
def test_a_raising_rank_ends_the_job_with_its_traceback_last(fault: str, rank: int, tmp_path: Path) -> None:
    """Also while both ranks log as fast as they can. The last line names the file in which it is kept."""
    outcome = run(fault, folder=tmp_path)
    assert outcome.returncode == 1
    assert outcome.stderr.count("ValueError: boom in training_step") <= (4 if fault == "flood@1" else 3)
    assert outcome.stderr.rstrip().endswith(f"ValueError: boom in training_step\n{SAVED}")
    check_kept(tmp_path, rank, "ValueError: boom in training_step")
    if fault != "flood@1":
        assert "fit_script.py" in last_lines(outcome.stderr), "the user's own line is in it"
    if rank == 1:
        headline = re.search(
            r"lightning-lockstep: rank 1 of 2 \(host .*\) failed at (.*): ValueError", outcome.stderr
        )
        assert headline is not None, outcome.stderr
        assert headline[1] == "epoch 0, step 5, batch 5, stage train, in training_step"
        assert outcome.stdout.count("caught RankFailedError") == 1


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
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=LockstepDDPStrategy(), max_steps=4, **options
        )
        with suppress(ValueError, SystemExit):
            trainer.fit(Ends(error))
        left = [
            (file.relative_to(folder), json.loads(file.read_text())) for file in folder.rglob("failure.json")
        ]
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


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_ours_on_one_rank_alone_is_not_lost(rank: int, tmp_path: Path) -> None:
    outcome = run(f"ours@{rank}", folder=tmp_path)
    assert outcome.returncode == 1
    check_kept(tmp_path, rank, "BatchSizeError: nothing fits")
    assert re.match(
        rf"rank {rank} of 2 \(host .*\) failed at epoch 0, step 5, .*: BatchSizeError: nothing fits$",
        outcome.stderr.rstrip().splitlines()[-2],
    ), outcome.stderr
    assert outcome.stderr.rstrip().endswith(SAVED)


def test_an_error_of_ours_on_all_ranks_is_its_message_alone(tmp_path: Path) -> None:
    """Without the rank that torch's hook puts in front of each line."""
    outcome = run("ours@all", folder=tmp_path)
    assert outcome.returncode == 1 and outcome.stderr.rstrip().endswith(SAVED)
    check_kept(tmp_path, 0, "BatchSizeError: nothing fits")
    assert "BatchSizeError: nothing fits" in last_lines(outcome.stderr)
    assert "[rank" not in outcome.stderr, outcome.stderr


@pytest.mark.parametrize(("fault", "fits"), [("prune", 2), ("pruned", 0)])
def test_a_failure_that_the_program_catches_on_all_ranks_is_survived(fault: str, fits: int) -> None:
    """Whether it works on for longer than the grace period and fits again, or ends."""
    outcome = run(fault)
    assert outcome.returncode == 0, outcome.output
    assert sorted(line for line in outcome.stdout.splitlines() if "caught" in line) == [
        "caught on rank 0",
        "caught on rank 1",
    ]
    assert outcome.stdout.count("fitted") == fits


def test_a_rank_out_of_memory_ends_the_job() -> None:
    outcome = run("memory@1")
    assert outcome.returncode == 1
    assert "DefaultCPUAllocator" in last_lines(outcome.stderr, 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_signal(rank: int, tmp_path: Path) -> None:
    """And with where the others were; of a killed rank 0 the next one prints and keeps the report."""
    outcome = run(f"kill@{rank}", folder=tmp_path)
    assert outcome.returncode == (-signal.SIGKILL if rank == 0 else 128 + signal.SIGKILL)
    if rank == 1:
        place = "while the others were at epoch 0, step 5, batch 5, stage train"
        assert re.search(rf"rank 1 of 2 .* was killed by SIGKILL {place}", last_lines(outcome.stderr))
    else:
        assert "rank 0 of 2" in outcome.stderr and "was lost" in outcome.stderr
    assert outcome.stderr.rstrip().endswith(SAVED)
    check_kept(tmp_path, rank, "killed by SIGKILL" if rank else "ended without reporting an error")


def test_sigterm_to_one_rank_ends_all_with_its_exit_code() -> None:
    outcome = run("term@1")
    assert outcome.returncode == 128 + signal.SIGTERM
    said, _, report = outcome.stderr.rpartition("\nlightning-lockstep: ")
    assert "This run has saved no checkpoint. The callback StopTogether() saves one" in said
    assert report.startswith("rank 1 of 2 ") and "Traceback" not in report
    assert "SIGTERMException: it received SIGTERM" in report, outcome.stderr


def test_ctrl_c_in_one_rank_is_reported_once_with_the_last_checkpoint(tmp_path: Path) -> None:
    outcome = run_script([str(SCRIPT), "interrupt@1"], timeout=LIMIT, cwd=tmp_path)
    assert outcome.returncode == 130, outcome.output
    (place,) = re.findall(r"rank 1 of 2 \(.*\) was interrupted at (.*): KeyboardInterrupt", outcome.stderr)
    assert place == "epoch 0, step 5, batch 5, stage train, in training_step"
    path = tmp_path / "saved" / "step=4.ckpt"
    assert f"fit(..., ckpt_path='{path}'). The callback StopTogether(signals=[" in outcome.stderr
    assert path.exists()


def test_sigterm_ends_a_prediction() -> None:
    outcome = run("predict@0")
    assert outcome.returncode == 128 + signal.SIGTERM, outcome.output
    assert "predicted all" not in outcome.stdout


@pytest.mark.parametrize(("fault", "code"), [("late", 0), ("late-fails", 1)])
def test_a_rank_that_still_works_is_waited_for(fault: str, code: int) -> None:
    """After three fits, each with a process group of its own on the same store."""
    outcome = run(fault)
    assert outcome.returncode == code, outcome.output
    assert outcome.stdout.count("fitted") == 2
    assert "rank 1 has written its predictions" in outcome.stdout
    assert "waiting for rank 1 of this host to end (process " in outcome.stderr
    assert ("rank 1 of this host failed: exit code 3" in outcome.stderr) == (code == 1)


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_a_standard_error_that_cannot_be_written_ends_no_run(stderr: str) -> None:
    outcome = run_script(
        ["bash", "-c", f'"$0" "$1" none {stderr}', sys.executable, str(SCRIPT)], timeout=LIMIT
    )
    assert outcome.stdout.count("fitted") == 2 and outcome.stdout.count("validated") == 2, outcome.output
    assert outcome.returncode in (0, 120), "120 is Python's own for a stream that it cannot flush"
    assert outcome.leftovers == ()


def test_a_rank_that_ends_before_all_have_met_ends_the_job() -> None:
    outcome = run("early")
    assert outcome.returncode == 1
    assert "RuntimeError: boom before the ranks met" in outcome.stderr
    assert "rank 1" in last_lines(outcome.stderr, 1)
    assert "ended before all ranks had met: exit code 1" in last_lines(outcome.stderr, 1)


def test_ctrl_c_ends_all_ranks_once() -> None:
    with start_script([str(SCRIPT), "wait"]) as script:
        script.wait_for("waiting[^w]*waiting", timeout=LIMIT)
        script.interrupt()
        outcome = script.finish(30)
    assert not outcome.timed_out
    assert outcome.leftovers == ()
    assert outcome.returncode == 130
    assert outcome.stderr.count("attempting graceful shutdown") == 1


def endless(method: str, folder: Path) -> Script:
    if method == "mpi" and (reason := why_no("open_mpi")):
        pytest.skip(reason)
    env = mpi_environ() if method == "mpi" else None
    return start_script([str(SCRIPT), "endless", method], env=env, cwd=folder)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("method", "number"),
    [
        ("mpi", signal.SIGTERM),
        ("mpi", signal.SIGUSR1),
        ("spawn", signal.SIGTERM),
        ("fork", signal.SIGUSR1),
        ("popen", signal.SIGTERM),
    ],
)
def test_a_signal_to_the_started_process_stops_all_ranks_with_a_checkpoint(
    method: str, number: signal.Signals, tmp_path: Path
) -> None:
    with endless(method, tmp_path) as script:
        script.wait_for(DASHES_PASS if method == "mpi" else "trains", timeout=LIMIT)
        script.send_signal(number)
        outcome = script.finish(LIMIT)
    assert outcome.returncode == 75, outcome.output
    assert f"received {number.name}" in outcome.stderr and outcome.leftovers == ()
    assert (tmp_path / "stopped" / "preempted.ckpt").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["mpi", "spawn", "fork", "popen"])
def test_ranks_end_when_the_started_process_is_killed(method: str, tmp_path: Path) -> None:
    with endless(method, tmp_path) as script:
        script.wait_for("trains", timeout=LIMIT)
        script.send_signal(signal.SIGKILL)
        outcome = script.finish(LIMIT, settle=30)
    assert outcome.leftovers == (), outcome.output


@pytest.mark.mpi
def test_output_that_nobody_reads_does_not_hold_mpirun_up() -> None:
    if reason := why_no("open_mpi"):
        pytest.skip(reason)
    pipeline = f"{sys.executable} {SCRIPT} chatty mpi | head -1; exit ${{PIPESTATUS[0]}}"
    outcome = run_script(["bash", "-c", pipeline], env=mpi_environ(), timeout=LIMIT)
    assert outcome.returncode == 0 and not outcome.timed_out, outcome.output
    assert outcome.leftovers == ()
    assert outcome.stderr.count("standard output cannot be written to ([Errno 32] Broken pipe)") == 1


@pytest.mark.parametrize(
    ("method", "fault"), [("spawn", "raise@1"), ("fork", "kill@1"), ("fsdp", "raise@1"), ("fsdp", "kill@1")]
)
def test_started_by_multiprocessing_or_with_a_part_of_the_model_each(
    method: str, fault: str, tmp_path: Path
) -> None:
    outcome = run(fault, method, folder=tmp_path)
    assert outcome.returncode == (1 if fault == "raise@1" else 128 + signal.SIGKILL)
    assert "rank 1 of 2" in outcome.stderr
    end = "ValueError: boom in training_step" if fault == "raise@1" else "killed by SIGKILL"
    assert end in last_lines(outcome.stderr, 5) and outcome.stderr.rstrip().endswith(SAVED)
    assert "caught RankFailedError" in outcome.stdout
    check_kept(tmp_path, 1, end)


def test_sigterm_to_all_forked_ranks_ends_the_program() -> None:
    """Lightning's exception for it is a SystemExit without a code."""
    outcome = run("term@all", "fork")
    assert outcome.returncode == 128 + signal.SIGTERM
    end = "SIGTERMException: it received SIGTERM\nThe other ranks were stopped.\n"
    assert outcome.stderr.rstrip().endswith(end + SAVED)


@pytest.mark.parametrize("fault", ["none", "alone-first"])
def test_forked_ranks_finish(fault: str) -> None:
    """Also where this process was the one rank of an earlier Trainer, which had a port of its own."""
    outcome = run(fault, "fork")
    assert outcome.returncode == 0, outcome.output
    assert "rank 0 fitted" in outcome.stdout


def test_under_torchrun_the_summary_has_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outcome = run_script([*command, str(SCRIPT), "raise@1"], timeout=LIMIT, cwd=tmp_path)
    assert not outcome.timed_out
    assert outcome.returncode == 1
    end = last_lines(outcome.stderr, 4)
    assert f"ValueError: boom in training_step\n  {SAVED}" in end
    check_kept(tmp_path, 1, "ValueError: boom in training_step")
    # Once and last; of the other rank there is one line.
    assert outcome.stderr.count("Traceback (most recent call last):\n    ...") == 1, outcome.stderr
    others, _, cause = outcome.stderr.rpartition("Root Cause (first observed failure)")
    assert re.search(r"rank +: 1 ", cause) and "another rank failed first: rank 1 of 2" in others
    assert "\nThe traceback is at the end of what torchrun prints.\n" in others


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_hosts_that_have_ipv6_alone() -> None:
    with Cluster(ipv6=True) as hosts:
        nodes = [
            hosts.start(
                node,
                [sys.executable, str(SCRIPT), "nodes"],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "MASTER_ADDR": hosts.addresses[0],
                    "MASTER_PORT": "29500",
                    "NODE_RANK": str(node),
                    "GLOO_SOCKET_IFNAME": hosts.cables[node],
                },
            )
            for node in (0, 1)
        ]
        outputs = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert all(f"rank {rank} fitted" in output for rank, output in enumerate(outputs)), outputs


def test_two_nodes_started_by_hand() -> None:
    with reserve_port() as port:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with start_script([str(SCRIPT), "nodes"], env={**common, "NODE_RANK": "0"}) as first:
            second = run_script([str(SCRIPT), "nodes"], env={**common, "NODE_RANK": "1"}, timeout=LIMIT)
            outcome = first.finish(LIMIT)
    assert (outcome.returncode, second.returncode) == (0, 0), outcome.output + second.output
    assert re.findall(r"rank 0 fitted (\S+)", outcome.stdout) == re.findall(
        r"rank 1 fitted (\S+)", second.stdout
    )
