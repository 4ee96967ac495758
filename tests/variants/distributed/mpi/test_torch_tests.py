"""Torch's own tests of torch.distributed, each over gloo and over mpi4py on the same MPI ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.models.distributed.mpi.launch import run_program

pytestmark = pytest.mark.mpi

#: Runs those too that need GPUs, do again what others do, or mostly sleep; docs/mpi.md has the command.
ALL = os.environ.get("LOCKSTEP_TEST_TORCH") == "all"
RANKS = 4  # some of them ask for exactly four

_ONLY_GLOO = "torch.distributed.monitored_barrier itself refuses every backend but gloo"
#: What gloo passes and mpi4py does not, and why.
DIFFERENT = {
    "test_monitored_barrier_failure_order": _ONLY_GLOO,
    "test_monitored_barrier_gloo": _ONLY_GLOO,
    "test_monitored_barrier_gloo_rank_0_timeout": _ONLY_GLOO,
    "test_monitored_barrier_gloo_subgroup": _ONLY_GLOO,
    "test_monitored_barrier_wait_all_ranks": _ONLY_GLOO,
    "test_sparse_all_reduce_sum": "mpi4py has no sums of sparse tensors",
}
_EQUAL_SHAPES = "the all_to_all of gloo wants tensors of one shape"
#: What mpi4py passes and gloo does not, and why.
BEYOND_GLOO = {
    "test_all_to_all": _EQUAL_SHAPES,
    "test_all_to_all_complex": _EQUAL_SHAPES,
    "test_all_to_all_full_group": _EQUAL_SHAPES,
    "test_all_to_all_group": _EQUAL_SHAPES,
}


def test_what_passes_over_gloo_passes_over_mpi4py(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's tests need expecttest: install the extra [dev]")
    arguments = ["--all"] if ALL else []
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        outcome, found = run_program(
            "open_mpi", RANKS, "program_torch_tests.py", folder, arguments=arguments, timeout=240
        )
        # Some 100 groups are made over gloo, one after the other; on a busy machine one in thousands does not connect.
        if "Gloo connectFullMesh failed" not in outcome.output:
            break
    assert outcome.returncode == 0 and len(found) == RANKS, outcome.output
    ended = {
        name: {backend: together([found[rank][name][backend] for rank in found]) for backend in by_backend}
        for name, by_backend in found[0].items()
    }
    both = [name for name, one in ended.items() if set(one.values()) == {"pass"} and len(one) == 2]
    others = {name: one for name, one in ended.items() if name not in both and skip(one) is None}
    assert {name: one for name, one in others.items() if name not in {**DIFFERENT, **BEYOND_GLOO}} == {}
    assert [name for name in both if name in {**DIFFERENT, **BEYOND_GLOO}] == [], "no longer different"
    for name, one in others.items():
        better = "mpi4py" if name in BEYOND_GLOO else "gloo"
        assert [backend for backend, end in one.items() if end == "pass"] == [better], f"{name}: {one}"
    assert len(both) >= 80 and len(others) >= 5


def together(ends: list[str]) -> str:
    """Return how a test ended on all ranks: if it failed on one, the first failure."""
    failures = [end for end in ends if not end.startswith(("pass", "skip"))]
    return (failures or ends)[0]


def skip(one: dict[str, str]) -> str | None:
    """Return why torch skips a test, if it does."""
    return next((end for end in one.values() if end.startswith("skip")), None)
