"""Start a two-rank job for one measurement: forked from a warm process, or as a user's script would."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import _fit
from tests.helpers import run_ranks, run_script

ROOT = Path(__file__).resolve().parents[1]


def in_ranks(job: _fit.Job) -> dict[str, Any]:
    """Run the job on two fresh ranks without paying the import again; rank 0's result."""
    threads = str(job.threads or 1)
    result: dict[str, Any] = run_ranks(
        2, _fit.fit, job, backend=None, timeout=120, env={"OMP_NUM_THREADS": threads}
    )[0]
    return result


def as_script(job: _fit.Job) -> dict[str, Any]:
    """Run the job as a script that starts its second rank itself, with the environment's thread defaults."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = run_script(
            _fit.arguments(job, result),
            timeout=180,
            env={"PYTHONPATH": path, "OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None},
        )
        if done.returncode or not result.exists():
            raise RuntimeError(f"the job {job} ended with {done.returncode}:\n{done.output}")
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured
