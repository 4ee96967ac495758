"""Torch's own tests of torch.distributed, each over gloo and over mpi4py on the same MPI ranks.

The tests are those of ``torch.testing._internal.distributed.distributed_test``, unchanged. Torch starts processes
for each; here the ranks are there, so each test gets a process group of its own in them instead.
"""

from __future__ import annotations

import os
import sys
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.launchers.environments import detect_environment
from tests.harness.patience import patience
from tests.models.distributed.mpi.launch import run_mpi_raw

pytestmark = pytest.mark.mpi

RANKS = 4  # some tests ask for exactly four
BACKENDS = ("gloo", "mpi4py")
TIMEOUT = timedelta(seconds=patience(30))
# Unless all run: parts of the names of tests that need GPUs or do again what others do, and tests that mostly sleep.
NEED_GPUS = ("averager", "cuda", "ddp", "localSGD", "nccl", "SyncBatchNorm")
AGAIN = ("full_group",)
SLEEP = {
    *("test_barrier", "test_barrier_timeout_group"),
    *("test_monitored_barrier_failure_order", "test_monitored_barrier_gloo"),
}


def torch_tests(folder):
    """Import torch's tests as for gloo: what they ask of gloo, they then ask of any backend."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(RANKS), TEMP_DIR=str(folder), INIT_METHOD="file://")
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    from torch.testing._internal.distributed import distributed_test

    # Read later, by what leaves out tests of groups of some ranks only: unless over "mpi", it wants 8 ranks.
    os.environ["BACKEND"] = "mpi"
    return distributed_test


def case_class(module):
    """Return torch's tests as a class whose ``outcome`` runs one on the ranks that are there."""
    from torch.testing._internal.common_utils import TestCase, set_rng_seed

    class Case(module.DistributedTest._DistTestBase, TestCase):
        def __init__(self, name, backend, rank, store, folder):
            super().__init__(name)
            self.name, self.backend = name, backend
            self.rank, self.world_size = rank, RANKS
            self.store = dist.PrefixStore(f"{backend}/{name}", store)
            self.init_method = f"file://{folder}/{backend}-{name}"
            self.barriers = 0

        def _barrier(self, *args, **kwargs):
            self.barriers += 1
            self.meet(f"barrier/{self.barriers}", TIMEOUT)

        def meet(self, where, timeout):
            keys = [f"{where}/{rank}" for rank in range(RANKS)]
            self.store.set(keys[self.rank], b"1")
            self.store.wait(keys, timeout)

        def outcome(self):
            # Of the tests that look at the name, these know nothing else to do.
            module.BACKEND = "gloo" if "accumulate_gradients" in self.name else self.backend
            module.INIT_METHOD = self.init_method
            options = {"rank": self.rank, "world_size": RANKS, "timeout": TIMEOUT}
            dist.init_process_group(self.backend, store=dist.PrefixStore("group", self.store), **options)
            set_rng_seed(1)
            try:
                getattr(self, self.name)()
                return "pass"
            except unittest.SkipTest as skip:
                return f"skip: {skip}"
            except SystemExit as end:
                return f"skip: {reason_of(end.code)}"
            except BaseException:
                # The others may be on their way to barriers that this rank does not come to any more.
                for i in range(self.barriers + 1, self.barriers + 9):
                    self.store.set(f"barrier/{i}/{self.rank}", b"1")
                return f"fail: {traceback.format_exc()}"
            finally:
                self.meet("end", 9 * TIMEOUT)
                if dist.is_initialized():
                    dist.destroy_process_group()
                sys.excepthook = sys.__excepthook__  # every default group wraps it once more

    return Case


def reason_of(code):
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return next((skip.message for skip in TEST_SKIPS.values() if skip.exit_code == code), f"exit {code}")


def skipped(test):
    """Return torch's reason to skip a test over gloo, if any; not that only MPI can do it."""
    why = getattr(test, "__unittest_skip_why__", "")
    return "" if why.startswith("Only MPI supports") else why


def chosen(case, every):
    names = [name for name in dir(case) if name.startswith("test_")]
    return [
        name for name in names if every or (name not in SLEEP and not any(part in name for part in NEED_GPUS + AGAIN))
    ]


def outcomes(folder, every):
    """Run the tests on this rank; return how each ended over each backend."""
    warnings.simplefilter("ignore")
    register_mpi_backend()
    env = detect_environment(mpi=True)
    rank = env.global_rank()
    (folder / "test_dir").mkdir(exist_ok=True)  # test_get_rank writes there
    store = dist.TCPStore(env.main_address, env.main_port, RANKS, False, multi_tenant=True)
    case = case_class(torch_tests(folder))
    seen = {}
    for name in chosen(case, every):
        why = skipped(getattr(case, name))
        seen[name] = {"gloo": f"skip: {why}"} if why else {}
        for backend in () if why else BACKENDS:
            seen[name][backend] = case(name, backend, rank, store, folder).outcome()
            if seen[name][backend].startswith("skip"):
                break  # on every rank, and over every backend
    return seen


#: Runs those too that need GPUs, do again what others do, or mostly sleep; docs/mpi.md has the command.
ALL = os.environ.get("LOCKSTEP_TEST_TORCH") == "all"

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
    for folder in (tmp_path / "first", tmp_path / "again"):
        folder.mkdir()
        outcome, found = run_mpi_raw(RANKS, outcomes, folder, ALL)
        # Some 100 groups are made over gloo, one after the other; on a busy machine one in thousands does not connect.
        if "Gloo connectFullMesh failed" not in outcome.output:
            break
    assert outcome.returncode == 0 and len(found) == RANKS, outcome.output
    ended = {
        name: {backend: together([of_rank[name][backend] for of_rank in found]) for backend in by_backend}
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
