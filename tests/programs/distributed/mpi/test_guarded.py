"""The guard over the backend mpi4py: each operation of torch.distributed runs as without it, and as over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.common.distributed.mpi.launch import run_program, why_no
from tests.helpers import run_ranks
from tests.ranks.distributed.guard.test_verify_agrees import PARTS

pytestmark = [
    pytest.mark.skipif(why_no("open_mpi") is not None, reason=why_no("open_mpi") or ""),
]


def over_gloo() -> Any:
    return json.loads(json.dumps([part(dist.get_rank()) for part in PARTS]))


@pytest.mark.mpi
@pytest.mark.parametrize("guard", ["watch", "verify"])
def test_every_operation_over_mpi4py_under_the_guard(guard: str, tmp_path: Path) -> None:
    outcome, found = run_program("open_mpi", 2, "program_guarded.py", tmp_path, arguments=[guard])
    assert outcome.returncode == 0, outcome.output
    for rank, expected in enumerate(run_ranks(2, over_gloo)):
        assert found[rank]["plain"] == expected
        assert found[rank]["guarded"] == expected
        assert found[rank]["outstanding"] == []
        assert {"all_reduce", "broadcast", "all_gather", "reduce_scatter"} <= set(found[rank]["operations"])
        _, error = found[rank]["buckets"]
        assert "\n  rank 0: gradients of two.bias\n" in error, "the parameters in each bucket are named"
        assert (
            "rank 1: gradients of one.weight, one.bias, two.weight, two.bias; only there one.weight" in error
        )
