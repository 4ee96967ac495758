"""DeepSpeed's ops built once for all ranks, with what the build needs and what is in its way looked for first."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LockstepDeepSpeedStrategy
from lightning_lockstep._doors.lightning import LightningModule, Trainer
from lightning_lockstep.deepspeed import build_tools as build_locks
from lightning_lockstep.deepspeed import builds
from lightning_lockstep.deepspeed.build_tools import (
    BuildLock,
    find_build_locks,
    missing_tools,
    remove_stale_locks,
)
from lightning_lockstep.deepspeed.builds import prepare_ops, prepared_where_loaded
from lightning_lockstep.distributed import current_communicator, shut_down
from lightning_lockstep.errors import ConfigurationError, LaunchError
from tests.helpers import RankOutcome, run_ranks, run_ranks_raw

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
COMPILER = shutil.which("g++")
NINJA = shutil.which("ninja")
needs_compiler = pytest.mark.skipif(not (COMPILER and NINJA), reason="there is no g++ or no ninja here")

left_behind = pytest.mark.skipif(
    build_locks.locked_by_kernel(), reason="no build with torch 2.15 or newer leaves a lock behind"
)

OP = "cpu_adam"


def prepare(options: dict[str, Any]) -> list[str]:
    """Prepare the op on this rank; returns what it raised, and what the op then computes."""
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    import_deepspeed("cpu")
    try:
        prepare_ops([OP], current_communicator(), **options)
    except LaunchError as error:
        return [str(error)]
    finally:
        shut_down()
    return []


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


# -- real builds ---------------------------------------------------------------------------------------


def prepare_and_step(options: dict[str, Any]) -> dict[str, Any]:
    told = prepare(options)
    if told:
        return {"told": told}
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    weights = [torch.nn.Parameter(torch.linspace(-1, 1, 64)) for _ in range(2)]
    optimizers = [
        DeepSpeedCPUAdam([weights[0]], lr=0.1),
        torch.optim.AdamW([weights[1]], lr=0.1, weight_decay=0.0),
    ]
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones(64)
        optimizer.step()
    return {"told": told, "same": torch.allclose(weights[0], weights[1], atol=1e-5)}


@needs_deepspeed
@needs_compiler
def test_one_of_two_ranks_compiles_and_both_have_the_op(tmp_path: Path, objects: Path) -> None:
    env = compiler_that("true", tmp_path, objects)
    stale = None if build_locks.locked_by_kernel() else lock_at(tmp_path / "ops" / OP / "lock")
    outcomes = run_ranks_raw(2, prepare_and_step, {"remove_stale_locks": True}, env=env, timeout=300)
    assert [outcome.value for outcome in outcomes] == [{"told": [], "same": True}] * 2, describe(outcomes)
    # Each source once, and all by rank 0.
    assert compilations(tmp_path) == ["0 cpu_adam.cpp", "0 cpu_adam_impl.cpp"]
    if stale is not None:
        assert not stale.exists()
        assert f"removed the lock of a build that was killed: {OP}: {stale}" in outcomes[0].stderr
    again = run_ranks(2, prepare_and_step, {}, env=env, timeout=300)
    assert again == [{"told": [], "same": True}] * 2, "the build of before is in no run's way"
    assert len(compilations(tmp_path)) == 2
    assert "removed the lock" not in outcomes[1].stderr
    # The next run compiles nothing.
    again = run_ranks(2, prepare_and_step, {}, env=env, timeout=300)
    assert again == [{"told": [], "same": True}] * 2
    assert len(compilations(tmp_path)) == 2


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


def fit_with_its_own_optimizer() -> list[str]:
    strategy = LockstepDeepSpeedStrategy(stage=2)
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, **plain)  # type: ignore[arg-type]
    try:
        trainer.fit(WithItsOwnOptimizer(), DataLoader(TensorDataset(torch.ones(16, 8)), 4))
    except LaunchError as error:
        return [str(error)]
    return [] if trainer.global_step == 2 else ["no step"]


@needs_deepspeed
@needs_compiler
@left_behind
def test_an_optimizer_that_configure_optimizers_makes_is_built_by_one_rank_behind_no_lock(
    tmp_path: Path, objects: Path
) -> None:
    env = compiler_that("sleep 5", tmp_path, objects)
    lock = lock_at(tmp_path / "ops" / OP / "lock")
    texts = run_ranks(2, fit_with_its_own_optimizer, env=env, backend=None, timeout=120)
    assert texts[0] == texts[1]
    assert f"rm {lock}" in texts[0][0]
    lock.unlink()
    outcomes = run_ranks_raw(2, fit_with_its_own_optimizer, env=env, backend=None, timeout=300)
    assert [outcome.value for outcome in outcomes] == [[], []], describe(outcomes)
    assert compilations(tmp_path) == ["0 cpu_adam.cpp", "0 cpu_adam_impl.cpp"]
    assert f"builds DeepSpeed's op {OP} in {tmp_path}/ops/{OP} (" in outcomes[0].stderr


def prepare_unless_killed(folder: str) -> list[str]:
    if os.environ["RANK"] == "0":
        Path(folder, "pid").write_text(str(os.getpid()))
    return prepare({})


@needs_deepspeed
@needs_compiler
def test_the_building_rank_is_killed(tmp_path: Path) -> None:
    """The other rank raises at once; the lock that torch leaves behind is found by the next run."""
    env = compiler_that(f"kill -9 $(cat {tmp_path}/pid); exit 1", tmp_path)
    outcomes = run_ranks_raw(2, prepare_unless_killed, str(tmp_path), env=env, linger=60)
    assert outcomes[0].signal is not None and outcomes[0].signal.name == "SIGKILL"
    assert outcomes[1].value is not None, describe(outcomes)
    [text] = outcomes[1].value
    assert "rank 0" in text
    assert "exited while building" in text or "Lost contact" in text

    lock = tmp_path / "ops" / OP / "lock"
    assert lock.exists()  # torch's own
    if build_locks.locked_by_kernel():
        assert find_build_locks(tmp_path / "ops") == []
        return
    texts = run_ranks(2, prepare, {}, env=env)
    assert texts[0] == texts[1]
    assert f"rm {lock}" in texts[0][0]
    assert "remove_stale_locks=True" in texts[0][0]
    assert lock.exists()


@needs_deepspeed
@needs_compiler
def test_a_build_that_fails_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    env = compiler_that("echo 'cpu_adam.cpp:1:1: error: no such instruction' >&2; exit 1", tmp_path)
    texts = run_ranks(2, prepare, {}, env=env)
    assert texts[0] == texts[1]
    [text] = texts[0]
    assert text.startswith("rank 0 on ")
    assert f"could not build DeepSpeed's op {OP}" in text
    assert "error: no such instruction" in text
    assert "create_op_builder('CPUAdamBuilder').load(verbose=True)" in text
    assert {line.split()[0] for line in compilations(tmp_path)} == {"0"}


@needs_deepspeed
@needs_compiler
def test_another_run_builds_and_does_not_end(tmp_path: Path) -> None:
    env = compiler_that("exit 1", tmp_path)
    with holder(tmp_path / "ops" / OP / "lock"):
        [[text]] = run_ranks(1, prepare, {"timeout": 2.0, "remove_stale_locks": True}, env=env)
    assert "Another build still holds its lock after 2 s" in text
    assert compilations(tmp_path) == []


def describe(outcomes: list[RankOutcome]) -> str:
    return "\n".join(f"{outcome.traceback}\n{outcome.stdout}\n{outcome.stderr}" for outcome in outcomes)


@needs_deepspeed
def test_an_error_that_no_build_has_caused_stays_itself() -> None:
    """A module may take another optimizer where an op cannot be built; what fails then is something else."""
    from lightning_lockstep._doors.deepspeed_internals import make_op_builder
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    import_deepspeed("cpu")

    def fail(names: list[str]) -> None:
        raise LaunchError("no compiler")

    with pytest.raises(KeyError, match="lr"), prepared_where_loaded(fail):
        with suppress(LaunchError):
            make_op_builder("CPUAdamBuilder").load()
        raise KeyError("lr")
    with pytest.raises(LaunchError, match="no compiler"), prepared_where_loaded(fail):
        try:
            make_op_builder("CPUAdamBuilder").load()
        except LaunchError as error:
            raise RuntimeError("requires the op") from error


def test_a_lock_that_cannot_be_removed_is_the_same_error_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> list[BuildLock]:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(builds, "_needs_build", lambda builder: True)
    monkeypatch.setattr(builds, "missing_tools", lambda ops: [])
    monkeypatch.setattr(builds, "build_folder", lambda op: tmp_path / op)
    monkeypatch.setattr(builds, "find_build_locks", refuse)
    with pytest.raises(LaunchError, match=r"rank 0 on a cannot wait for other builds in .*not yours"):
        builds._build({OP: object()}, "rank 0 on a", True, 1.0)


# -- what a build needs --------------------------------------------------------------------------------


def programs(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


@needs_deepspeed
@needs_compiler
def test_without_a_compiler(tmp_path: Path) -> None:
    env = {"PATH": programs(tmp_path / "bin", "ninja"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    texts = run_ranks(2, prepare, {}, env=env)
    assert texts[0] == texts[1]
    [text] = texts[0]
    assert text.startswith(f"DeepSpeed's ops ({OP}) cannot be built:")
    assert text.endswith("There is no C++ compiler: apt-get install g++")


def test_what_is_missing_is_said_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert missing_tools([OP]) == [
        "There is no C++ compiler: apt-get install g++",
        "There is no ninja: pip install ninja",
        f"Python's headers are missing (/nowhere/Python.h): apt-get install python{version}-dev",
    ]
    (tmp_path / "dnf").touch(mode=0o755)
    assert missing_tools([OP])[0] == "There is no C++ compiler: dnf install gcc-c++"


def test_ninja_beside_the_interpreter_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"ninja is installed in {tmp_path} and not found: export PATH={tmp_path}:$PATH" in missing_tools(
        [OP]
    )


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++-99 -m64")
    assert missing_tools([OP])[0].startswith("The C++ compiler '/nowhere/g++-99' that CXX names is not there")


def missing_of_async_io() -> list[str]:
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    import_deepspeed("cpu")
    return missing_tools(["async_io"])


@needs_deepspeed
@needs_compiler
@pytest.mark.skipif(Path("/usr/include/libaio.h").exists(), reason="libaio is installed here")
def test_without_libaio() -> None:
    [missing] = run_ranks(1, missing_of_async_io, backend=None)
    assert missing == ["The library aio and its headers are missing: apt-get install libaio-dev"]


def prepare_unknown(names: list[str]) -> str:
    from lightning_lockstep.deepspeed.importing import import_deepspeed

    import_deepspeed("cpu")
    try:
        prepare_ops(names, current_communicator())
    except ConfigurationError as error:
        return str(error)
    finally:
        shut_down()
    return ""


@needs_deepspeed
def test_ops_that_are_not_there() -> None:
    [text] = run_ranks(1, prepare_unknown, ["cpu_adm", "fused_lamb"])
    assert "names='cpu_adm': expected one of" in text
    assert "Did you mean 'cpu_adam'" in text
    assert "names='fused_lamb': expected an op of DeepSpeed's accelerator 'cpu'" in text


@needs_deepspeed
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_in_which_nobody_may_write(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir(mode=0o500)
    [[text]] = run_ranks(1, prepare, {}, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")})
    assert "No folder can be made for the build" in text


@needs_deepspeed
@needs_compiler
def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "ops").touch()
    texts = run_ranks(2, prepare, {}, env={"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")})
    assert texts[0] == texts[1]
    assert "No folder can be made for the build" in texts[0][0]
    assert "export TORCH_EXTENSIONS_DIR=/tmp/ops" in texts[0][0]


# -- locks ---------------------------------------------------------------------------------------------


@contextmanager
def holder(path: Path) -> Iterator[psutil.Popen]:
    """A process that holds a lock as torch does: it has made the file and keeps it open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = (
        "import fcntl, os, sys; lock = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL);"
        " fcntl.flock(lock, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    process = psutil.Popen(
        [sys.executable, "-S", "-c", source, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("held", [True, False])
def test_with_locks_of_the_kernel_the_file_alone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    monkeypatch.setattr(build_locks, "locked_by_kernel", lambda: True)
    path = lock_at(tmp_path / OP / "lock")
    with path.open("rb+") as file:
        if held:
            fcntl.flock(file, fcntl.LOCK_EX)
        assert [(lock.op, lock.is_stale) for lock in find_build_locks(tmp_path)] == [(OP, False)] * held
        assert remove_stale_locks(True, tmp_path) == []
    assert path.exists() and find_build_locks(tmp_path) == []


@pytest.fixture
def lock_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks are those of torch before 2.15: they last as long as their files."""
    monkeypatch.setattr(build_locks, "locked_by_kernel", lambda: False)


@pytest.mark.usefixtures("lock_files")
def test_a_lock_that_nobody_holds_is_stale(tmp_path: Path) -> None:
    path = lock_at(tmp_path / OP / "lock")
    os.utime(path, (time.time() - 600, time.time() - 600))
    [lock] = find_build_locks(tmp_path)
    assert (lock.path, lock.op, lock.is_stale) == (path, OP, True)
    assert lock.age == pytest.approx(600, abs=60)
    assert "10 min ago, held by no process of this host" in str(lock)


@pytest.mark.usefixtures("lock_files")
def test_removal_needs_consent(tmp_path: Path) -> None:
    paths = [lock_at(tmp_path / op / "lock") for op in (OP, "utils")]
    with pytest.raises(LaunchError) as caught:
        remove_stale_locks(False, tmp_path)
    assert f"rm {paths[0]} {paths[1]}" in str(caught.value)
    assert all(path.exists() for path in paths)
    assert [lock.op for lock in remove_stale_locks(True, tmp_path, ops=[OP])] == [OP]
    assert [path.exists() for path in paths] == [False, True]
    assert [lock.op for lock in remove_stale_locks(True, tmp_path)] == ["utils"]
    assert remove_stale_locks(False, tmp_path) == []


@pytest.mark.usefixtures("lock_files")
def test_a_lock_that_a_process_holds_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / OP / "lock"
    with holder(path):
        [lock] = find_build_locks(tmp_path)
        assert not lock.is_stale
        assert remove_stale_locks(True, tmp_path) == []
        assert remove_stale_locks(False, tmp_path) == []
        assert path.exists()
    # It was killed, and nobody has removed its lock.
    [lock] = find_build_locks(tmp_path)
    assert lock.is_stale


@pytest.mark.usefixtures("lock_files")
def test_a_lock_that_is_closed_and_about_to_be_removed_is_not_left_behind(tmp_path: Path) -> None:
    path = lock_at(tmp_path / OP / "lock")
    timer = threading.Timer(0.05, path.unlink)
    timer.start()
    assert remove_stale_locks(False, tmp_path) == []
    timer.join()


@pytest.mark.usefixtures("lock_files")
def test_the_lock_of_torch_itself(tmp_path: Path) -> None:
    from torch.utils.file_baton import FileBaton

    (tmp_path / OP).mkdir()
    baton = FileBaton(str(tmp_path / OP / "lock"))
    assert baton.try_acquire()
    [lock] = find_build_locks(tmp_path)
    assert not lock.is_stale
    baton.release()
    assert find_build_locks(tmp_path) == []


@pytest.mark.usefixtures("lock_files")
def test_the_processes_of_other_hosts_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_locks, "_is_of_several_hosts", lambda path: True)
    path = lock_at(tmp_path / OP / "lock")
    assert [lock.is_stale for lock in find_build_locks(tmp_path)] == [False]
    long_ago = time.time() - 3 * 3600
    os.utime(path, (long_ago, long_ago))
    assert [lock.is_stale for lock in find_build_locks(tmp_path)] == [True]


@pytest.mark.usefixtures("lock_files")
def test_locks_below_torchs_own_root(tmp_path: Path) -> None:
    path = lock_at(tmp_path / "py311_cpu" / OP / "lock")
    assert [lock.path for lock in find_build_locks(tmp_path)] == [path]
    assert find_build_locks(tmp_path, ops=["utils"]) == []
    assert isinstance(find_build_locks(tmp_path, ops=[OP])[0], BuildLock)


@pytest.mark.usefixtures("lock_files")
def test_where_the_kernel_does_not_say_who_has_the_lock_only_its_age_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EINVAL, "no leases here")

    monkeypatch.setattr("fcntl.fcntl", refuse)
    path = lock_at(tmp_path / OP / "lock")
    assert [lock.is_stale for lock in find_build_locks(tmp_path)] == [False]
    long_ago = time.time() - 3 * 3600
    os.utime(path, (long_ago, long_ago))
    assert [lock.is_stale for lock in find_build_locks(tmp_path)] == [True]


@pytest.mark.usefixtures("lock_files")
def test_looking_at_a_lock_disturbs_nobody_who_looks_at_the_same_time(tmp_path: Path) -> None:
    """A signal goes to the holder of a lease when another process opens the file."""
    path = lock_at(tmp_path / OP / "lock")
    looks = (
        "import pathlib, sys; from lightning_lockstep.deepspeed.build_tools import find_build_locks;"
        "[find_build_locks(pathlib.Path(sys.argv[1])) for _ in range(2000)]"
    )
    both = [subprocess.Popen([sys.executable, "-c", looks, str(tmp_path)]) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert path.exists()
