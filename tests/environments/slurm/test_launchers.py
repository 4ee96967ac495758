"""Ranks, and the doctor, that a real Slurm starts, requeues and ends: two nodes on this machine."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.harness.patience import patience, wait_until
from tests.harness.ports import reserve_port
from tests.harness.scripts import ScriptOutcome
from tests.harness.slurm import Slurm, why_no_pmix
from tests.models.distributed.mpi.launch import _mpich_prefix, mpi_environ, why_no
from tests.models.strategies import outliving

PROGRAM = Path(__file__).with_name("program.py")
TWO_NODES = ("-N2", "--ntasks-per-node=2")
ONE_NODE = ("-N1", "--ntasks-per-node=2")
NO_PMIX = pytest.mark.skipif(why_no_pmix() is not None, reason=str(why_no_pmix()))
# Over two nodes on one host PMIx cannot work: both would have one socket.
WITH_PMIX = pytest.param("pmix", ONE_NODE, marks=NO_PMIX)


def srun(slurm: Slurm, do: str, *options: str, cwd: Path, **env: str) -> ScriptOutcome:
    return slurm.run(["srun", "--kill-on-bad-exit", *options, sys.executable, str(PROGRAM), do], cwd=cwd, env=env)


@pytest.mark.parametrize(("mpi", "options"), [("pmi2", TWO_NODES), WITH_PMIX])
def test_ddp_is_no_mpi_whatever_srun_offers(slurm: Slurm, mpi: str, options: tuple[str, ...], tmp_path: Path) -> None:
    outcome = srun(slurm, "fit", f"--mpi={mpi}", *options, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.output
    ranks = 4 if options == TWO_NODES else 2
    expected = [f"rank {rank} of {ranks}: SlurmStepEnvironment 6" for rank in range(ranks)]
    assert sorted(re.findall(r"rank .*", outcome.stdout)) == expected


def test_deepspeed_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    outcome = srun(slurm, "deepspeed", *TWO_NODES, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.output
    expected = [f"rank {rank} of 4: SlurmStepEnvironment 6" for rank in range(4)]
    assert sorted(re.findall(r"rank \d of .*", outcome.stdout)) == expected


def test_a_task_on_each_node_starts_the_ranks_there_and_they_outlive_one(slurm: Slurm, tmp_path: Path) -> None:
    undisturbed = outliving.fit(tmp_path / "whole", "end", max_epochs=2)
    folder, options = tmp_path / "lost", json.dumps({"num_nodes": 2, "max_epochs": 2})
    folder.mkdir()
    command = [sys.executable, str(outliving.SCRIPT), str(folder), "continue", "2:backward:4", "0:save:10"]
    outcome = slurm.run(
        ["srun", "-N2", "--ntasks-per-node=1", *command],
        timeout=outliving.LIMIT,
        cwd=tmp_path,
        env={"OPTIONS": options},
    )
    outliving.check_same(outliving.Fit(folder, outcome), undisturbed)
    assert "rank 2 was lost at epoch 0, step 4 (SIGKILL); went on with 3 ranks" in outcome.stderr
    assert "rank 0 was lost at epoch 0, step 10 (SIGKILL); went on with 2 ranks" in outcome.stderr


@pytest.mark.parametrize(
    ("kind", "mpi", "options"),
    [
        ("mpich", "pmi2", ("-N2", "--ntasks-per-node=1")),
        pytest.param("open_mpi", *WITH_PMIX.values, marks=NO_PMIX),
    ],
    ids=["mpich", "open_mpi"],
)
def test_ranks_of_mpi(slurm: Slurm, kind: str, mpi: str, options: tuple[str, ...], tmp_path: Path) -> None:
    if (reason := why_no(kind)) is not None:
        pytest.skip(reason)
    # Not mpi_command: these stay with the other tests of Slurm, of which there is one at a time.
    python = sys.executable if kind == "open_mpi" else str(_mpich_prefix() / "bin" / "python")  # type: ignore[operator]
    env = {**mpi_environ(), "DEVICES": options[1][-1]}
    outcome = slurm.run(["srun", f"--mpi={mpi}", *options, python, str(PROGRAM), "mpi"], cwd=tmp_path, env=env)
    assert outcome.returncode == 0 and not outcome.timed_out, outcome.output
    expected = [f"rank {rank} of 2: SrunMPIEnvironment 6" for rank in range(2)]
    assert sorted(re.findall(r"rank \d of .*", outcome.stdout)) == expected


def test_a_step_with_fewer_tasks_than_its_job_and_tasks_alone(slurm: Slurm, tmp_path: Path) -> None:
    program = f"{sys.executable} {PROGRAM} fit"
    job = slurm.submit(f"srun -N1 -n2 {program}; srun -n4 {program}", "-N2", "-n4", cwd=tmp_path)
    slurm.wait(job)
    output = slurm.output(tmp_path, job)
    assert "rank 1 of 2: SlurmStepEnvironment 6" in output, slurm.describe(tmp_path, job)
    # -n4 on two nodes puts three tasks on one of them.
    assert "The Trainer and srun disagree" in output and "--nodes=2 --ntasks-per-node=2" in output, output


def test_what_cannot_be_started_says_so_at_once(slurm: Slurm, tmp_path: Path) -> None:
    """A batch script with a step at the port of another."""
    step = f"srun --kill-on-bad-exit -N1 -n2 {sys.executable} {PROGRAM} fit"
    with reserve_port() as port:
        other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        other.set("lockstep/name", "Slurm step 7.0.0@other")
        job = slurm.submit(f"MASTER_PORT={port} {step}", *TWO_NODES, cwd=tmp_path)
        assert slurm.wait(job) == "FAILED"
    output = slurm.output(tmp_path, job)
    # The first is what rank 0 says, the second what rank 1 does; the first to end stops the other.
    told = ("another program uses that port", "found 'Slurm step 7.0.0@other'")
    assert any(text in output for text in told), output


def test_steps_without_a_port_have_one_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    program = f"srun --exact -N1 -n2 {sys.executable} {PROGRAM} fit"
    job = slurm.submit(f"{program} & {program} & wait", "-N1", "-n4", cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED", slurm.describe(tmp_path, job)
    assert slurm.output(tmp_path, job).count(" of 2: SlurmStepEnvironment 6") == 4


def signalled(slurm: Slurm, job: str, folder: Path) -> None:
    begun = wait_until(lambda: "step 10" in slurm.output(folder, job), patience(60), 0.1)
    assert begun, slurm.describe(folder, job)
    slurm.signal(job, signal.SIGUSR1)


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm, tmp_path: Path) -> None:
    """Without StopTogether in the program."""
    script = f"srun {sys.executable} {PROGRAM} requeue"
    job = slurm.submit(script, *TWO_NODES, cwd=tmp_path, env={"RUN_FOLDER": str(tmp_path)})
    signalled(slurm, job, tmp_path)
    assert slurm.wait(job) == "COMPLETED", slurm.describe(tmp_path, job)
    output = slurm.output(tmp_path, job)
    steps = [int(step) for step in re.findall(r"^step (\d+)", output, re.MULTILINE)]
    assert steps == list(range(40)), output
    saved = re.findall(r"Slurm was asked to requeue the job, to resume from (\S+\.ckpt)", output)
    assert len(saved) == 1 and Path(saved[0]).is_file()
    expected = [f"rank {rank} of 4: SlurmStepEnvironment 40" for rank in range(4)]
    assert sorted(re.findall(r"rank \d of \d: .*", output)) == expected


def test_a_job_that_slurm_does_not_requeue_says_so(slurm: Slurm, tmp_path: Path) -> None:
    script = f"srun {sys.executable} {PROGRAM} requeue"
    job = slurm.submit(script, "--no-requeue", *ONE_NODE, cwd=tmp_path, env={"RUN_FOLDER": str(tmp_path)})
    signalled(slurm, job, tmp_path)
    assert slurm.wait(job) == "FAILED", slurm.describe(tmp_path, job)
    output = slurm.output(tmp_path, job)
    said = re.findall(r"Slurm did not requeue the job \(scontrol requeue (\d+): .+\): submit it again", output)
    assert said == [job], output
    assert "was asked to requeue" not in output


def test_a_failing_rank_is_named_last(slurm: Slurm, tmp_path: Path) -> None:
    outcome = srun(slurm, "raise", *TWO_NODES, cwd=tmp_path)
    assert outcome.returncode != 0 and not outcome.timed_out
    lines = [line for line in outcome.stderr.splitlines() if line and not line.startswith(("srun:", "slurmstepd"))]
    assert any("rank 1 of 4" in line for line in lines[-12:]), outcome.stderr
    assert "ValueError: boom" in lines[-2] and lines[-1].startswith("Saved to ")


def test_the_doctor_in_tasks_of_two_nodes_makes_one_table(slurm: Slurm) -> None:
    command = ["srun", "-N2", sys.executable, "-m", "lightning_lockstep.doctor", "network", "slurm", "--json"]
    outcome = slurm.run(command, env=mpi_environ(), timeout=120)
    assert outcome.returncode == 0 and not outcome.timed_out, outcome.output
    found = {check["check"]: check["findings"] for check in json.loads(outcome.stdout)["checks"]}
    rows = {row["subject"]: row for row in found["network"]}
    assert rows["ranks"]["evidence"].startswith("all 2 reported"), rows
    assert rows["gloo"]["status"] == "ok", rows
    [place] = [row["evidence"] for row in found["slurm"] if row["subject"] == "place"]
    assert place.startswith("task 0 of 2 in step") and place.endswith("on 2 nodes")
