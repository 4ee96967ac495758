"""`lockstep-train` on a real Slurm, by the batch scripts of the examples."""

from __future__ import annotations

import csv
import json
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.harness.patience import patience, wait_until
from tests.harness.scripts import ScriptOutcome
from tests.harness.slurm import Slurm

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL = "data=source_text model=byte_gpt data.max_bytes=100000 trainer.accelerator=cpu"


def submit(slurm: Slurm, example: str, arguments: str, *options: str, cwd: Path) -> str:
    script = f"bash {EXAMPLES / example} {SMALL} {arguments}"
    return slurm.submit(script, *options, cwd=cwd, env={"VENV": sys.prefix})


def run_folders(cwd: Path) -> list[Path]:
    return sorted(cwd.glob("outputs/*/*"))


def steps_logged(run: Path) -> list[int]:
    found: list[int] = []
    for file in sorted(run.glob("csv/**/metrics.csv"), key=lambda path: path.stat().st_mtime):
        with open(file, newline="") as rows:
            found += [int(row["step"]) for row in csv.DictReader(rows) if row.get("train_loss")]
    return found


def test_a_requeued_run_goes_on_in_its_folder(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(
        slurm,
        "slurm_ddp.sh",
        "trainer.max_steps=60 trainer.max_epochs=100 test=false",
        "-N2",
        "--ntasks-per-node=2",
        cwd=tmp_path,
    )
    begun = wait_until(lambda: list(tmp_path.glob("outputs/*/*/csv/metrics.csv")), patience(60))
    assert begun, slurm.describe(tmp_path, job)
    slurm.signal(job, signal.SIGUSR1)
    assert slurm.wait(job, timeout=150) == "COMPLETED", slurm.describe(tmp_path, job)
    output = slurm.output(tmp_path, job)
    [run] = run_folders(tmp_path)
    saved = re.search(r"resume from (\S+hpc_ckpt_1\.ckpt)", output)
    assert saved is not None and Path(saved[1]).is_file(), output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 60
    assert 0 < summary["samples_per_second"] < 100_000
    metrics = summary["metrics"]
    # The weights of step 60 are validated, not those of the requeue, whose loss is that of an untrained model, about 4.
    assert metrics["val_loss"] < metrics["train_loss"] + 0.5, metrics
    assert Path(summary["files"]["best checkpoint"]).is_file()
    # Lightning logs a batch after its last hook, in which the ranks leave: that batch is trained, but has no row.
    left = re.search(r"optimizer step (\d+)\)", output)
    assert left is not None
    assert steps_logged(run) == [step for step in range(60) if step != int(left[1]) - 1]


def test_runs_that_start_together_have_folders_of_their_own(slurm: Slurm, tmp_path: Path) -> None:
    script = f"{EXAMPLES / 'slurm_array.sh'} {SMALL} trainer.max_steps=2 test=false validate=false"

    def run(task: int) -> ScriptOutcome:
        # The script as a task of an array runs it, in an allocation of its own.
        command = ["salloc", "--job-name=seeds", "-N1", "--ntasks-per-node=2", "bash", "-c", f"bash {script}"]
        env = {"VENV": sys.prefix, "SLURM_ARRAY_TASK_ID": str(task)}
        return slurm.run(command, cwd=tmp_path, env=env, timeout=120)

    with ThreadPoolExecutor() as pool:
        outcomes = list(pool.map(run, (1, 2)))
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    seeds = [(folder / ".hydra" / "frozen.yaml").read_text() for folder in run_folders(tmp_path)]
    assert sorted(re.findall(r"^seed: (\d+)", "\n".join(seeds), re.MULTILINE)) == ["1", "2"]


def test_a_sweep_of_jobs_whose_tasks_are_ranks(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    command = [sys.executable, "-m", "lightning_lockstep.train", "-m", "hydra/launcher=submitit_slurm"]
    command += ["hydra.launcher.tasks_per_node=2", "hydra.sweep.dir=sweep", "seed=1,2", *SMALL.split()]
    outcome = slurm.run([*command, "trainer.max_steps=2", "test=false"], cwd=tmp_path, timeout=150)
    assert outcome.returncode == 0, outcome.output
    jobs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/summary.json"))]
    assert [(job["ranks"], job["steps"]) for job in jobs] == [(2, 2), (2, 2)]
    seeds = [path.read_text() for path in sorted(tmp_path.glob("sweep/*/.hydra/frozen.yaml"))]
    assert re.findall(r"^seed: (\d+)", "\n".join(seeds), re.MULTILINE) == ["1", "2"]
