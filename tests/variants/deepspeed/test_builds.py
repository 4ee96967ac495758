"""DeepSpeed's ops compiled by one rank of a node; a build that fails is in test_examples.py."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

from lightning_lockstep.deepspeed.importing import import_deepspeed, load_ops
from lightning_lockstep.distributed import shut_down
from lightning_lockstep.errors import LockstepError
from tests.harness import run_ranks, run_ranks_raw

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    not (COMPILER and shutil.which("ninja")),
    reason="there is no compiler here: apt-get install g++ ninja-build",
)

SOURCES = ["cpu_adam.cpp", "cpu_adam_impl.cpp"]


def load() -> str:
    """Load an op on this rank; returns what it raised."""
    import_deepspeed("cpu")
    try:
        load_ops(["CPUAdamBuilder"], timeout=900.0)
    except LockstepError as error:
        return str(error)
    finally:
        shut_down()
    return ""


def slow_compiler(folder: Path) -> dict[str, str]:
    """Variables for a compiler that notes each compilation with its rank, and takes its time."""
    script = folder / "g++"
    script.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -c "*)\n'
        f'  echo "$RANK $*" >> {folder}/calls\n'
        "  sleep 5\n"  # longer than what is not worth a line
        f'  exec {COMPILER} "$@" -O0 -g0;;\n'  # half the time of an optimised build, and the same files
        "esac\n"
        f'exec {COMPILER} "$@"\n'
    )
    script.chmod(0o755)
    return {"CXX": str(script), "TORCH_EXTENSIONS_DIR": str(folder / "ops")}


def compilations(folder: Path) -> tuple[int, list[str]]:
    """How many ranks have compiled, and the source of each compilation."""
    lines = (folder / "calls").read_text().splitlines()
    names = sorted(Path(line.split(" -c ")[1].split()[0]).name for line in lines)
    return len({line.split()[0] for line in lines}), names


def load_and_step() -> bool:
    """Return whether the op, once it is loaded, computes what torch does."""
    said = load()
    assert said == "", said
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2)]
    optimizers = [
        DeepSpeedCPUAdam([weights[0]], lr=0.1),
        torch.optim.AdamW([weights[1]], lr=0.1, weight_decay=0.0),
    ]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones(64)
        optimizer.step()
    return torch.allclose(weights[0], weights[1], atol=1e-5)


def test_one_of_two_ranks_compiles_and_both_have_the_op(tmp_path: Path) -> None:
    env = slow_compiler(tmp_path)
    outcomes = run_ranks_raw(2, load_and_step, env=env, timeout=1000)
    said = "".join(outcome.stdout + outcome.stderr for outcome in outcomes)
    assert [outcome.value for outcome in outcomes] == [True, True], said
    assert compilations(tmp_path) == (1, SOURCES)
    assert len(re.findall(r"rank 0 on [^ ]+ builds DeepSpeed.s op cpu_adam, or waits", said)) == 1
    assert run_ranks(2, load_and_step, env=env, timeout=1000) == [True, True]
    assert compilations(tmp_path) == (1, SOURCES), "the next run compiles nothing"
