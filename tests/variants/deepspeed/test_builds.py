"""DeepSpeed's ops compiled once for all ranks, with what is in the way of the build said on all of them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDeepSpeedStrategy
from lightning_lockstep._doors.lightning import LightningModule, Trainer
from lightning_lockstep.deepspeed.build_tools import find_build_locks, locked_by_kernel, missing_tools
from lightning_lockstep.deepspeed.builds import prepare_ops
from lightning_lockstep.deepspeed.importing import import_deepspeed
from lightning_lockstep.distributed import current_communicator, shut_down
from lightning_lockstep.errors import ConfigurationError, LaunchError
from tests.helpers import RankOutcome, run_ranks, run_ranks_raw

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(
    not (COMPILER and shutil.which("ninja")),
    reason="there is no compiler here: apt-get install g++ ninja-build",
)

OP = "cpu_adam"
SOURCES = ["0 cpu_adam.cpp", "0 cpu_adam_impl.cpp"]  # and the rank that compiles each


def prepare(names: tuple[str, ...] = (OP,), **options: Any) -> str:
    """Prepare ops on this rank; returns what it raised."""
    import_deepspeed("cpu")
    try:
        prepare_ops(names, current_communicator(), **options)
    except (ConfigurationError, LaunchError) as error:
        return str(error)
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
    """Rank and source of each compilation."""
    lines = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return sorted(f"{line.split()[0]} {Path(line.split(' -c ')[1].split()[0]).name}" for line in lines)


def lock_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def describe(outcomes: list[RankOutcome]) -> str:
    return "\n".join(f"{outcome.traceback}\n{outcome.stdout}\n{outcome.stderr}" for outcome in outcomes)


def prepare_and_step() -> bool:
    """Return whether the op, once it is prepared, computes what torch does."""
    assert prepare(remove_stale_locks=True) == ""
    shut_down()
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
    env = compiler_that("true", tmp_path, objects)
    stale = None if locked_by_kernel() else lock_at(tmp_path / "ops" / OP / "lock")
    outcomes = run_ranks_raw(2, prepare_and_step, env=env, timeout=300)
    assert [outcome.value for outcome in outcomes] == [True, True], describe(outcomes)
    assert compilations(tmp_path) == SOURCES
    if stale is not None:
        assert not stale.exists()
        assert f"removed the lock of a build that was killed: {OP}: {stale}" in outcomes[0].stderr
        assert "removed the lock" not in outcomes[1].stderr
    assert run_ranks(2, prepare_and_step, env=env, timeout=300) == [True, True]
    assert compilations(tmp_path) == SOURCES, "the next run compiles nothing"


class WithItsOwnOptimizer(LightningModule):
    """Makes the optimizer of DeepSpeed whose op is compiled, so that no configuration names it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), lr=0.1)


def fit_with_its_own_optimizer(lock: str) -> tuple[str, int]:
    """Return what the fit says while a lock is in its way, and the steps that it makes after that."""

    def fit() -> Trainer:
        plain: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        strategy = LockstepDeepSpeedStrategy(stage=2)
        trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, **plain)
        trainer.fit(WithItsOwnOptimizer(), DataLoader(TensorDataset(torch.ones(16, 8)), 4))
        return trainer

    said = ""
    if not locked_by_kernel():
        with pytest.raises(LaunchError) as caught:
            fit()
        said = str(caught.value)
        Path(lock).unlink(missing_ok=True)
    return said, fit().global_step


def test_an_optimizer_that_configure_optimizers_makes_is_built_by_one_rank_behind_no_lock(
    tmp_path: Path, objects: Path
) -> None:
    env = compiler_that("sleep 5", tmp_path, objects)  # longer than what is not worth a line
    lock = lock_at(tmp_path / "ops" / OP / "lock")
    outcomes = run_ranks_raw(2, fit_with_its_own_optimizer, str(lock), env=env, backend=None, timeout=300)
    assert all(outcome.ok for outcome in outcomes), describe(outcomes)
    assert [outcome.value[1] for outcome in outcomes] == [2, 2]
    assert outcomes[0].value == outcomes[1].value
    if not locked_by_kernel():
        assert f"rm {lock}" in outcomes[0].value[0] and "remove_stale_locks=True" in outcomes[0].value[0]
    assert compilations(tmp_path) == SOURCES
    assert f"builds DeepSpeed's op {OP} in {tmp_path}/ops/{OP} (" in outcomes[0].stderr


def prepare_unless_killed(folder: str) -> str:
    if os.environ["RANK"] == "0":
        Path(folder, "pid").write_text(str(os.getpid()))
    try:
        return prepare()
    finally:
        shut_down()


def test_the_building_rank_is_killed(tmp_path: Path) -> None:
    env = compiler_that(f"kill -9 $(cat {tmp_path}/pid); exit 1", tmp_path)
    outcomes = run_ranks_raw(2, prepare_unless_killed, str(tmp_path), env=env, linger=60)
    assert outcomes[0].signal is not None and outcomes[0].signal.name == "SIGKILL"
    text = outcomes[1].value
    assert text is not None, describe(outcomes)
    assert "rank 0" in text and ("exited while building" in text or "Lost contact" in text)
    assert (tmp_path / "ops" / OP / "lock").exists()  # torch's own
    assert [lock.is_stale for lock in find_build_locks(tmp_path / "ops")] == [True] * (not locked_by_kernel())


def builds_that_fail(folder: str) -> dict[str, Any]:
    """Return what each is told; ranks that have failed go on with the next."""
    import_deepspeed("cpu")
    found: dict[str, Any] = {"unknown": prepare(("cpu_adm", "fused_lamb"))}

    def run(name: str, ops: str, path: str = os.environ["PATH"], **options: Any) -> None:
        os.environ |= {"TORCH_EXTENSIONS_DIR": str(Path(folder, ops)), "PATH": path}
        found[name] = prepare(**options)

    given = os.environ["PATH"]
    run("fails", "ops")
    run("file", "file")
    held = Path(folder, "held", OP, "lock")
    with held.open():  # as torch does: a process that builds keeps it open
        run("held", "held", timeout=2.0, remove_stale_locks=True)
    compiler = os.environ.pop("CXX")
    run("no compiler", "ops", str(Path(folder, "bin")))
    os.environ |= {"CXX": compiler, "PATH": given}
    found["async_io"] = missing_tools(["async_io"])
    shut_down()
    return found


def test_what_is_in_the_way_of_a_build_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    env = compiler_that("echo 'cpu_adam.cpp:1:1: error: no such instruction' >&2; exit 1", tmp_path)
    (tmp_path / "file").touch()
    lock_at(tmp_path / "held" / OP / "lock")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ninja").symlink_to(shutil.which("ninja") or "")
    found, other = run_ranks(2, builds_that_fail, str(tmp_path), env=env, timeout=120)
    assert found == other
    assert "names='cpu_adm': expected one of" in found["unknown"]
    assert "Did you mean 'cpu_adam'" in found["unknown"]
    assert "names='fused_lamb': expected an op of DeepSpeed's accelerator 'cpu'" in found["unknown"]
    assert found["fails"].startswith("rank 0 on ") and "error: no such instruction" in found["fails"]
    assert f"could not build DeepSpeed's op {OP}" in found["fails"]
    assert "create_op_builder('CPUAdamBuilder').load(verbose=True)" in found["fails"]
    assert {line.split()[0] for line in compilations(tmp_path)} == {"0"}
    assert "No folder can be made for the build" in found["file"]
    assert "export TORCH_EXTENSIONS_DIR=/tmp/ops" in found["file"]
    assert "Another build still holds its lock after 2 s" in found["held"] or locked_by_kernel()
    assert found["no compiler"].startswith(f"DeepSpeed's ops ({OP}) cannot be built:")
    assert found["no compiler"].endswith("There is no C++ compiler: apt-get install g++")
    if not Path("/usr/include/libaio.h").exists():
        assert found["async_io"] == [
            "The library aio and its headers are missing: apt-get install libaio-dev"
        ]
