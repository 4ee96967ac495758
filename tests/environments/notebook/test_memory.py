"""A worker that is really killed because memory ran out: the kernel is in a control group with a limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environments.notebook.kernels import Kernel

pytestmark = [pytest.mark.allow_leaks("threads")]

MIB = 2**20
LIMIT = 300 * MIB


def limited_group() -> tuple[Path, Path] | None:
    """Make a control group for memory; return its folder and the file of its limit, or None where it cannot be."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = root / f"lockstep-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / limit).write_text(str(LIMIT))
        except OSError:
            folder.rmdir()
        else:
            return folder, folder / limit
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    made = limited_group()
    if made is None:
        pytest.skip("control groups of memory cannot be made here (needs root)")
    folder, _ = made
    yield folder
    folder.rmdir()


def test_a_rank_killed_for_memory_is_said_to_be_that_and_one_model_outside_is_shared(
    group: Path, tmp_path: Path
) -> None:
    """Three ranks with a model of 150 MB each do not fit below the limit; one for all of them does."""
    with Kernel(tmp_path) as kernel:
        begun = kernel.run("""
            import os, pathlib, signal, time
            import torch
            from lightning_lockstep import notebook_launcher

            def make():
                return torch.nn.Linear(6200, 6200)
            def train(model=None):
                if model is None:
                    # The operating system then kills a rank, and not the kernel of the notebook.
                    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
                    model = make()
                time.sleep(1)
                return model.weight.sum().isfinite().item()
        """)
        assert begun.error is None, begun.error
        (group / "cgroup.procs").write_text(str(kernel.pid))
        output = kernel.run("notebook_launcher(train, (), 3, grace_period=2)")
        assert output.error is not None, output.result
        assert re.match(
            r"(?s)RankFailedError: rank \d of 3 \([^)]*\) was killed by SIGKILL\n.*If the host ran out of memory, make"
            r" the model once, in a cell, and pass it to the function",
            output.error,
        ), output.error
        output = kernel.run("model = make(); notebook_launcher(train, (model,), 3)")
        assert output.result == "True", output.error
        assert kernel.run("os.kill(os.getpid(), 0)").error is None
