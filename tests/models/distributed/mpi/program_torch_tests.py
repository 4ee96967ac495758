"""Runs torch's own tests of torch.distributed over gloo and over mpi4py; writes down how each ended.

    mpirun -n 4 python program_torch_tests.py FOLDER [--all | NAME ...]

The tests are those of ``torch.testing._internal.distributed.distributed_test``, unchanged. Torch starts processes
for each; here the ranks are there, so each test gets a process group of its own in them instead.
"""

import json
import os
import sys
import traceback
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_lockstep.distributed.mpi.backend import register_mpi_backend
from lightning_lockstep.launchers.environments import detect_environment
from tests.harness.patience import patience

RANKS = 4  # some tests ask for exactly four
BACKENDS = ("gloo", "mpi4py")
TIMEOUT = timedelta(seconds=patience(30))
# Without --all: parts of the names of tests that need GPUs or do again what others do, and tests that mostly sleep.
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


def chosen(case, arguments):
    names = [name for name in dir(case) if name.startswith("test_")]
    if "--all" in arguments:
        return names
    return arguments or [
        name for name in names if name not in SLEEP and not any(part in name for part in NEED_GPUS + AGAIN)
    ]


def main():
    warnings.simplefilter("ignore")
    register_mpi_backend()
    folder, env = Path(sys.argv[1]), detect_environment(mpi=True)
    rank = env.global_rank()
    (folder / "test_dir").mkdir(exist_ok=True)  # test_get_rank writes there
    store = dist.TCPStore(env.main_address, env.main_port, RANKS, False, multi_tenant=True)
    case = case_class(torch_tests(folder))
    seen = {}
    for name in chosen(case, sys.argv[2:]):
        why = skipped(getattr(case, name))
        seen[name] = {"gloo": f"skip: {why}"} if why else {}
        for backend in () if why else BACKENDS:
            seen[name][backend] = case(name, backend, rank, store, folder).outcome()
            if seen[name][backend].startswith("skip"):
                break  # on every rank, and over every backend
    (folder / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
