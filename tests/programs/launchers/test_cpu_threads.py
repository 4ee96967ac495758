"""Threads and cores of a rank, and who started it."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from lightning_lockstep.launchers.environments import (
    LockstepEnvironment,
    SlurmStepEnvironment,
    detect_environment,
    requeue_signal,
)
from lightning_lockstep.launchers.rank_supervisor import plan_threads
from tests.helpers import run_script


@pytest.mark.parametrize(
    ("asked", "cores", "ranks", "expected"),
    [
        ("auto", 8, 2, [(4, (0, 1, 2, 3)), (4, (4, 5, 6, 7))]),
        ("auto", 2, 4, [(1, (0,)), (1, (1,)), (1, (0,)), (1, (1,))]),
        (3, 8, 2, [(3, (0, 1, 2)), (3, (3, 4, 5))]),
        (16, 2, 2, [(16, (0, 1)), (16, (0, 1))]),
    ],
)
def test_the_cores_are_shared_out(asked: object, cores: int, ranks: int, expected: list[object]) -> None:
    plans = [
        plan_threads(asked, cores=tuple(range(cores)), local_rank=rank, local_world_size=ranks)  # type: ignore[arg-type]
        for rank in range(ranks)
    ]
    assert plans == expected


def test_nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "TORCHELASTIC", "LSB_", "LOCAL_RANK")):
            monkeypatch.delenv(name)
    environment = detect_environment()
    assert isinstance(environment, LockstepEnvironment)
    assert not environment.creates_processes_externally


def test_a_single_task_of_slurm_is_not_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    assert isinstance(detect_environment(), LockstepEnvironment)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert isinstance(detect_environment(), LockstepEnvironment), "a batch script"
    assert requeue_signal(detect_environment()) is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert isinstance(detect_environment(), SlurmStepEnvironment)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert isinstance(detect_environment(), LockstepEnvironment)
    assert requeue_signal(detect_environment()) is signal.SIGUSR1, "but srun has started it"


def test_a_machine_that_has_srun_is_not_warned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(detect_environment(), LockstepEnvironment)


def test_torchrun_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "0")
    assert type(detect_environment()).__name__ == "TorchElasticEnvironment"


def test_a_trainer_with_our_strategy_never_starts_mpi() -> None:
    code = """
        import sys
        import lightning as L, lightning_lockstep as ll
        L.Trainer(accelerator="cpu", devices=2, strategy=ll.LockstepDDPStrategy(), logger=False)
        assert "mpi4py" not in sys.modules, "mpi4py was imported"
        print("quiet")
    """
    outcome = run_script([sys.executable, "-c", textwrap.dedent(code)], timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert "quiet" in outcome.stdout


def test_ctrl_c_ends_a_main_thread_that_no_handler_reaches() -> None:
    """The main thread sits in C, as in a collective: Python cannot run its handler, the watch can act."""
    code = """
        import ctypes, os, signal, threading, time
        from lightning_lockstep.launchers.subprocess_script import watch_interrupts

        def stuck():
            print("ended by the watch", flush=True)
            os._exit(130)

        watch_interrupts(stuck, patience=0.5)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        libc = ctypes.CDLL(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while True:
            lock = ctypes.create_string_buffer(64)
            libc.pthread_mutex_init(lock, None)
            libc.pthread_mutex_lock(lock)
            libc.pthread_mutex_lock(lock)  # never returns, whatever signal comes
    """
    outcome = run_script([sys.executable, "-c", textwrap.dedent(code)], timeout=180)
    assert not outcome.timed_out
    assert outcome.returncode == 130
    assert "ended by the watch" in outcome.stdout


def test_an_interrupt_that_python_handles_is_left_alone() -> None:
    code = """
        import os, signal, time
        from lightning_lockstep.launchers.subprocess_script import watch_interrupts

        end = watch_interrupts(lambda: os._exit(9), patience=0.3)
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                time.sleep(1)  # the program goes on, for longer than the patience
        end()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print("handled")
    """
    outcome = run_script([sys.executable, "-c", textwrap.dedent(code)], timeout=180)
    assert (outcome.returncode, outcome.stdout.strip()) == (0, "handled")
    assert signal.SIGINT
