"""ReplicaCheck under MPI and under DeepSpeed, which divides what it compares elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep import LockstepDeepSpeedStrategy
from tests.common.distributed.mpi.launch import mpi_command, mpi_environ, why_no
from tests.common.replicas.fits import Case, fit
from tests.helpers import COMMON, run_ranks, run_script

PROGRAM = COMMON / "replicas" / "program_mpi.py"


@pytest.mark.mpi
@pytest.mark.skipif(why_no("open_mpi") is not None, reason=str(why_no("open_mpi")))
def test_over_mpi(tmp_path: Path) -> None:
    outcome = run_script(
        [*mpi_command("open_mpi", 2), str(PROGRAM), str(tmp_path)], env=mpi_environ(), timeout=120
    )
    assert outcome.returncode == 0, outcome.output
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["backend"]["name"] == "mpi4py"
    assert found["healthy"] == {"error": None, "lines": [], "steps": 12}
    assert "An optimizer has stepped on some ranks only" in found["skipped"]["error"]
    assert found["device"]["error"].startswith("rank 0, rank 1 compute different values")


def stages() -> dict[str, Any]:
    """A fit in step and one that is not, at each stage."""
    found = {}
    for stage in (1, 2, 3):
        for fault in ("", "layer"):
            # The engine writes all weights anew in its next step.
            case = Case(fault=fault, steps=7, step=5, optimizer="Adam")
            found[f"{stage} {fault}"] = fit(case, plain_strategy=LockstepDeepSpeedStrategy(stage=stage))
    return found


def test_under_deepspeed_what_each_rank_has_whole_is_compared() -> None:
    pytest.importorskip("deepspeed")
    found = run_ranks(2, stages, backend="gloo", timeout=240)[0]
    for name, outcome in found.items():
        if name in ("1 layer", "2 layer"):
            assert "first.weight" in outcome["error"], name
        else:
            assert outcome["error"] is None and outcome["lines"] == [], (name, outcome)
