"""AutoBatchSize under mpirun."""

from __future__ import annotations

import json
import re

import pytest

from tests.common.distributed.mpi.launch import mpi_command, mpi_environ, why_no
from tests.helpers import COMMON, run_script

pytestmark = pytest.mark.mpi

PROGRAM = COMMON / "batch_size" / "program_mpi.py"


@pytest.mark.skipif(why_no("open_mpi") is not None, reason=str(why_no("open_mpi")))
def test_search_and_recovery_on_two_ranks_of_an_mpi_job(tmp_path):
    outcome = run_script(
        [*mpi_command("open_mpi", 2), str(PROGRAM)], env=mpi_environ(), cwd=tmp_path, timeout=170
    )
    assert outcome.returncode == 0, outcome.output
    found = [json.loads(text) for text in re.findall(r"FOUND (\{.*?\})", outcome.output)]
    assert sorted(each.pop("rank") for each in found) == [0, 1]
    assert found[0] == found[1] or abs(found[0]["apart"] - found[1]["apart"]) < 1e-5
    for each in found:
        assert all(294 <= each[f"search {where}"] <= 300 for where in ("forward", "backward", "optimizer"))
        assert each["split"] >= 2 and each["apart"] < 1e-5
