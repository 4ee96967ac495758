"""Ranks that a real Slurm starts, requeues and ends: two nodes on this machine."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.patience import patience
from tests.helpers.scripts import ScriptOutcome
from tests.helpers.slurm import Slurm, why_no_slurm

PROGRAM = Path(__file__).parent / "slurm_program.py"
REASON = why_no_slurm()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]
TWO_NODES = ("-N2", "--ntasks-per-node=2")
ONE_NODE = ("-N1", "--ntasks-per-node=2")


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Slurm() as made:
        yield made


def srun(slurm: Slurm, do: str, *options: str, cwd: Path, **env: str) -> ScriptOutcome:
    return slurm.run(
        ["srun", "--kill-on-bad-exit", *options, sys.executable, str(PROGRAM), do], cwd=cwd, env=env
    )


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_ddp_is_no_mpi_whatever_srun_offers(slurm: Slurm, mpi: str, tmp_path: Path) -> None:
    outcome = srun(slurm, "fit", f"--mpi={mpi}", *TWO_NODES, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.output
    expected = [f"rank {rank} of 4: SlurmStepEnvironment 6" for rank in range(4)]
    assert sorted(re.findall(r"rank .*", outcome.stdout)) == expected


def test_a_step_with_fewer_tasks_than_its_job_and_tasks_alone(slurm: Slurm, tmp_path: Path) -> None:
    program = f"{sys.executable} {PROGRAM} fit"
    job = slurm.submit(f"srun -N1 -n2 {program}; srun -n4 {program}", "-N2", "-n4", cwd=tmp_path)
    slurm.wait(job)
    output = slurm.output(tmp_path, job)
    assert "rank 1 of 2: SlurmStepEnvironment 6" in output
    # -n4 on two nodes puts three tasks on one of them.
    assert "The Trainer and srun disagree" in output and "--nodes=2 --ntasks-per-node=2" in output, output


def test_the_trainer_and_srun_disagree(slurm: Slurm, tmp_path: Path) -> None:
    outcome = srun(slurm, "fit", *ONE_NODE, cwd=tmp_path, NODES="2")
    assert outcome.returncode != 0
    assert re.search(r"Trainer \(devices x num_nodes\) +4 +2 +2", outcome.output), outcome.output
    assert re.search(r"srun +2 +2 +1", outcome.output)
    assert "devices=2 and num_nodes=1" in outcome.output


def test_a_batch_script_without_srun_is_refused_at_once(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(f"NODES=2 {sys.executable} {PROGRAM} fit", *TWO_NODES, cwd=tmp_path)
    assert slurm.wait(job) == "FAILED"
    assert "Put srun in front of the command" in slurm.output(tmp_path, job)


def test_two_steps_at_one_port_are_told_apart(slurm: Slurm, tmp_path: Path) -> None:
    # The first holds the port for as long as it sleeps.
    outcomes: list[ScriptOutcome] = []

    def run() -> None:
        outcomes.append(srun(slurm, "fit", *ONE_NODE, "--nodelist=n1", cwd=tmp_path, MASTER_PORT="23456"))

    first = threading.Thread(target=run)
    first.start()
    run()
    first.join()
    good, bad = sorted(outcomes, key=lambda outcome: outcome.returncode)
    if bad.returncode != 0:  # they ran at the same time
        assert "another program has that port" in bad.output or "Two jobs were given the same" in bad.output
    assert good.returncode == 0 and "rank 1 of 2" in good.output


def test_steps_without_a_port_have_one_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    program = f"srun --exact -N1 -n2 {sys.executable} {PROGRAM} fit"
    job = slurm.submit(f"{program} & {program} & wait", "-N1", "-n4", cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED"
    assert slurm.output(tmp_path, job).count(" of 2: SlurmStepEnvironment 6") == 4


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm, mpi: str, tmp_path: Path) -> None:
    """Without StopTogether in the program."""
    script = f"srun --mpi={mpi} {sys.executable} {PROGRAM} requeue"
    job = slurm.submit(script, *TWO_NODES, cwd=tmp_path, env={"RUN_FOLDER": str(tmp_path)})
    deadline = time.monotonic() + patience(60)
    while "step 10" not in slurm.output(tmp_path, job):
        assert time.monotonic() < deadline, slurm.output(tmp_path, job)
        time.sleep(0.1)
    slurm.signal(job, signal.SIGUSR1)
    assert slurm.wait(job) == "COMPLETED"
    output = slurm.output(tmp_path, job)
    steps = [int(step) for step in re.findall(r"^step (\d+)", output, re.MULTILINE)]
    assert steps == list(range(40)), output
    saved = re.search(r"resume from (\S+\.ckpt)", output)
    assert saved is not None and Path(saved[1]).is_file()
    assert sorted(re.findall(r"rank \d of 4: .*", output)) == [
        f"rank {rank} of 4: SlurmStepEnvironment 40" for rank in range(4)
    ]


@pytest.mark.parametrize("do", ["raise", "kill"])
def test_a_failing_rank_is_named_last(slurm: Slurm, do: str, tmp_path: Path) -> None:
    outcome = srun(slurm, do, *TWO_NODES, cwd=tmp_path)
    assert outcome.returncode != 0 and not outcome.timed_out
    lines = [
        line for line in outcome.stderr.splitlines() if line and not line.startswith(("srun:", "slurmstepd"))
    ]
    expected = "ValueError: boom" if do == "raise" else "killed by SIGKILL"
    assert any("rank 1 of 4" in line for line in lines[-12:]), outcome.stderr
    assert do == "kill" or expected in lines[-1]
