"""DeepSpeed's ops compiled by one rank of a node, and a build that fails or is killed."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from lightning_lockstep.deepspeed.importing import import_deepspeed, load_ops
from lightning_lockstep.distributed import shut_down
from lightning_lockstep.errors import LockstepError
from tests.helpers import RankOutcome, run_ranks, run_ranks_raw

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    not (COMPILER and shutil.which("ninja")),
    reason="there is no compiler here: apt-get install g++ ninja-build",
)

OP = "cpu_adam"
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


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compilers keep what they have made: the sources are compiled once for all tests."""
    return tmp_path_factory.mktemp("objects")


def compiler_that(does: str, folder: Path, objects: Path | None = None) -> dict[str, str]:
    """Variables for a compiler that notes each compilation with its rank, and does something first."""
    folder.mkdir(exist_ok=True)
    script = folder / "g++"
    script.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" -c "*)\n'
        f'  echo "$RANK $*" >> {folder}/calls\n'
        f"  {does}\n"
        '  for each in "$@"; do\n'
        '    case "$before" in -c) source=$each;; -o) output=$each;; -MF) parts=$each;; esac\n'
        "    before=$each\n"
        "  done\n"
        f"  kept={objects or folder}/$(basename $source)\n"
        '  if [ -e $kept.o ]; then cp $kept.d "$parts" && exec cp $kept.o "$output"; fi\n'
        # Half the time of an optimised build, and the same files.
        f'  {COMPILER} "$@" -O0 -g0 && cp "$parts" $kept.d && exec cp "$output" $kept.o\n'
        "  exit\n"
        "esac\n"
        f'exec {COMPILER} "$@"\n'
    )
    script.chmod(0o755)
    return {"CXX": str(script), "TORCH_EXTENSIONS_DIR": str(folder / "ops")}


def compilations(folder: Path) -> list[str]:
    """The source of each compilation, and whether the rank that compiles is the same for all."""
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    first = lines[0].split()[0] if lines else ""  # the rank that came first
    names = [(line.split()[0] == first, Path(line.split(" -c ")[1].split()[0]).name) for line in lines]
    return sorted(name if is_first else f"another: {name}" for is_first, name in names)


def describe(outcomes: list[RankOutcome]) -> str:
    return "\n".join(f"{outcome.traceback}\n{outcome.stdout}\n{outcome.stderr}" for outcome in outcomes)


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


def test_one_of_two_ranks_compiles_and_both_have_the_op(tmp_path: Path, objects: Path) -> None:
    env = compiler_that("sleep 5", tmp_path, objects)  # longer than what is not worth a line
    outcomes = run_ranks_raw(2, load_and_step, env=env, timeout=1000)
    assert [outcome.value for outcome in outcomes] == [True, True], describe(outcomes)
    assert compilations(tmp_path) == SOURCES
    said = "".join(outcome.stderr for outcome in outcomes)
    assert len(re.findall(f"rank 0 on [^ ]+ builds DeepSpeed.s op {OP}, or waits", said)) == 1
    assert run_ranks(2, load_and_step, env=env, timeout=1000) == [True, True]
    assert compilations(tmp_path) == SOURCES, "the next run compiles nothing"


def load_unless_killed(folder: str) -> str:
    if os.environ["RANK"] == "0":
        Path(folder, "pid").write_text(str(os.getpid()))
    return load()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_build_that_fails_is_an_error_on_all_ranks_and_not_tried_again(
    tmp_path: Path, is_killed: bool
) -> None:
    kills = f"test $RANK = 0 && kill -9 $(cat {tmp_path}/pid); " if is_killed else ""
    env = compiler_that(f"{kills}echo 'cpu_adam.cpp:1:1: error: no such instruction' >&2; exit 1", tmp_path)
    outcomes = run_ranks_raw(2, load_unless_killed, str(tmp_path), env=env, linger=60, timeout=120)
    if is_killed and outcomes[0].signal is not None:
        assert "rank 0" in outcomes[1].value, describe(outcomes)
        return
    for outcome in outcomes:
        assert f"could not build DeepSpeed's op {OP}" in outcome.value, describe(outcomes)
        assert "error: no such instruction" in outcome.value
    assert not any("another" in line for line in compilations(tmp_path))
