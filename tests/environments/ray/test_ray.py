"""The example for Ray Train, with Ray."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

import pytest

from tests.harness import run_script

ROOT = Path(__file__).parents[3]
OWN = ROOT / ".venv-ray" / "bin" / "python"
PYTHON = sys.executable if importlib.util.find_spec("ray") else str(OWN)


@pytest.mark.skipif(not Path(PYTHON).exists(), reason="Ray is not installed; scripts/setup makes .venv-ray with it")
def test_ray_names_the_worker_that_failed_and_the_second_attempt_goes_on() -> None:
    with tempfile.TemporaryDirectory(prefix="ray.") as folder:  # a longer path would be too long for Ray's sockets
        environ = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        script = [PYTHON, ROOT / "examples" / "ray" / "resumed.py"]
        outcome = run_script(script, env=environ, fresh=True, timeout=300)
    assert outcome.returncode == 0, outcome.output
    assert "failed at epoch 1, step 13, batch 3, stage train, in on_train_batch_start: RuntimeError" in outcome.output
    last = outcome.stdout.rstrip().splitlines()[-1]
    assert last == "done: 20 steps; the second attempt began at epoch 1, batch 2", outcome.output
