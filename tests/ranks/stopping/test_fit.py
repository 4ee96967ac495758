"""Stopping together in real fits on real ranks."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import Preempted, StopTogether, check_breakpoint, set_breakpoint
from lightning_lockstep._lightning import EarlyStopping, SLURMEnvironment
from tests.harness import logged, run_ranks, run_ranks_raw
from tests.models.stopping.fits import BATCHES, Module, early_stopping_case, fit


def all_cases(folder: str) -> dict[str, Any]:
    return {
        "error": early_stopping_case("only rank 0 has it", folder, False),
        "use_present": early_stopping_case("only rank 0 has it", folder, False, missing="use_present"),
        "different": early_stopping_case("different values", folder, False),
        "nan": early_stopping_case("nan on rank 1", folder, False),
        "nobody": early_stopping_case("different values", folder, False, monitor="n"),
    }


def loud(folder: str) -> list[str]:
    with logged(EarlyStopping.__module__, logging.INFO) as texts:
        early_stopping_case("different values", folder, False, verbose=True)
    return texts


def test_early_stopping_is_the_same_on_every_rank(tmp_path):
    values = run_ranks(2, all_cases, str(tmp_path), backend=None, timeout=150)
    assert values[0] == values[1]
    ended = values[0]
    assert ended["error"]["error"] == "MetricMissingError"
    assert "which is logged by rank 0 and not by rank 1" in ended["error"]["message"]
    assert ended["use_present"]["reason"] == "PATIENCE_EXHAUSTED"
    assert ended["nobody"]["error"] == "MetricMissingError" and "`m`" in ended["nobody"]["message"]
    different = ended["different"]
    assert (different["best_score"], different["wait_count"]) == (1.0, 2)  # 1, 1.1, 1.2: no improvement
    assert ended["nan"]["reason"] == "NON_FINITE_METRIC"
    assert "not finite on rank 1." in ended["nan"]["message"]


def test_what_is_said_is_said_once(tmp_path):
    (improved, stopped), of_rank_1 = run_ranks(2, loud, str(tmp_path), backend=None, timeout=150)
    assert of_rank_1 == []
    assert "Metric m improved" in improved and "Signaling Trainer to stop" in stopped


def break_on(rank: int, batch: int) -> Any:
    def act(module: Module, batch_idx: int) -> None:
        if module.global_rank == rank and module.current_epoch == 0 and batch_idx == batch:
            set_breakpoint("the loss looks odd")
        take_time(module, batch_idx, after=(0, batch))

    return act


def terminate_on(rank: int, epoch: int, batch: int, number: signal.Signals = signal.SIGTERM) -> Any:
    def act(module: Module, batch_idx: int) -> None:
        if (module.global_rank, module.current_epoch, batch_idx) == (rank, epoch, batch):
            os.kill(os.getpid(), number)
        take_time(module, batch_idx, after=(epoch, batch))

    return act


def take_time(module: Module, batch_idx: int, after: tuple[int, int]) -> None:
    """Take longer over the batches after a request, so that few of them pass while it travels on a busy machine."""
    time.sleep(0.1 if (module.current_epoch, batch_idx) > after else 0.003)


def breakpoints(folder: str) -> dict[str, Any]:
    module = Module(act=break_on(1, 7))
    trainer = fit(module, [StopTogether()], folder, min_epochs=3)
    found = check_breakpoint()
    again = Module()
    fit(again, [StopTogether()], folder, max_epochs=1)
    return {
        "last": module.seen[-1][:2],
        "reason": found.reason if found else None,
        "min_epochs": trainer.fit_loop.min_epochs,
        "again": len(again.seen),
        "after": check_breakpoint(),
    }


def preempted_then_resumed(folder: str) -> dict[str, Any]:
    options: dict[str, Any] = {"max_epochs": 3, "accumulate_grad_batches": 3}
    whole, first, second = Module(), Module(act=terminate_on(1, 1, 4)), Module()
    fit(whole, [StopTogether()], folder, **options)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as left:
        fit(first, [StopTogether()], folder, **options)
    trainer = fit(second, [StopTogether()], folder, ckpt_path=left.value.checkpoint, **options)
    return {
        "code": left.value.code,
        "reason": left.value.reason,
        "checkpoint": left.value.checkpoint,
        "handler given back": signal.getsignal(signal.SIGTERM) == before,
        "same batches": first.seen + second.seen == whole.seen,
        "cut": len(first.seen),
        "steps": trainer.global_step,
    }


def terminate_after_the_last(module: Module) -> Callable[[], None]:
    def hook() -> None:
        if module.global_rank == 1 and module.current_epoch == module.trainer.max_epochs - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def outside_of_training(folder: str) -> dict[str, Any]:
    """A SIGTERM on rank 1 while no training batch is under way."""
    out = {}
    for name, epoch, sanity in (
        ("sanity check", 0, True),
        ("validation", 1, False),
        ("after the last batch", -1, False),  # of which the next fit hears nothing
        ("last validation", 2, False),
    ):
        sent = []

        def act(module: Module, batch_idx: int, epoch: int = epoch, sanity: bool = sanity, sent: list = sent) -> None:
            trainer = module.trainer
            if (module.current_epoch, trainer.sanity_checking) == (epoch, sanity) and not sent:
                sent.append(batch_idx)
                if module.global_rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        module = Module()
        module.act_in_validation = act
        if epoch < 0:
            module.on_train_epoch_end = terminate_after_the_last(module)
        try:
            fit(module, [StopTogether()], folder, max_epochs=3, validates=True, num_sanity_val_steps=1)
            out[name] = {}
        except Preempted as preempted:
            saved = torch.load(preempted.checkpoint, weights_only=True)
            out[name] = {
                "reason": preempted.reason,
                "batches": len(module.seen),
                "saved": saved["global_step"],
            }
    return out


def stops(folder: str) -> dict[str, Any]:
    return {
        "breakpoint": breakpoints(folder),
        "signal": preempted_then_resumed(folder),
        "outside": outside_of_training(folder),
    }


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, stops, str(tmp_path_factory.mktemp("fits")), backend=None, timeout=150)


def test_a_breakpoint_on_rank_1_takes_all_ranks_out_after_the_same_batch(stopped):
    found, other = (value["breakpoint"] for value in stopped)
    assert found == other
    assert (0, 7) <= tuple(found["last"]) < (2, BATCHES - 1), "not before the request, and before the end"
    assert found["reason"] == "rank 1: the loss looks odd"
    assert found["min_epochs"] == 3, "given back after the fit"
    assert found["again"] == BATCHES and found["after"] is None


def test_a_signal_on_one_rank_saves_ends_all_and_resumes_at_the_next_batch(stopped):
    found, other = (value["signal"] for value in stopped)
    assert found == other
    assert found["code"] == 75 and found["same batches"] and found["handler given back"]
    assert BATCHES + 5 <= found["cut"] < 3 * BATCHES, "not before the signal, and before the end"
    assert found["cut"] % 3 == 0, "accumulated gradients are not thrown away"
    assert found["reason"] == "rank 1: received SIGTERM"
    assert Path(found["checkpoint"]).name == "preempted.ckpt"


def test_a_signal_outside_of_training_is_obeyed_at_the_next_batch_or_the_end(stopped):
    values = [value["outside"] for value in stopped]
    assert values[0] == values[1]
    for name, least in (
        ("sanity check", 1),
        ("validation", 2 * BATCHES + 1),
        ("after the last batch", 3 * BATCHES),
        ("last validation", 3 * BATCHES),
    ):
        ended = values[0][name]
        assert ended["reason"] == "rank 1: received SIGTERM"
        # Usually a batch or two later; on a busy machine the decision takes as long as an epoch of so small a model.
        assert least <= ended["batches"] <= min(least + 2 * BATCHES, 3 * BATCHES), name
        assert ended["saved"] == ended["batches"]


def requeued_by_slurm(folder: str, ours: bool, number: signal.Signals) -> dict[str, Any]:
    """Under our strategy the callback is not given, and the environment is detected."""
    module = Module(act=terminate_on(0, 0, 4, number))
    environment = SLURMEnvironment(auto_requeue=True, requeue_signal=number)
    given = {"strategy": "lockstep_ddp"} if ours else {"plugins": [environment]}
    try:
        with logged() as said:
            fit(module, [] if ours else [StopTogether()], folder, **given)
    except Preempted as preempted:
        exists = Path(preempted.checkpoint).exists()
        return {"checkpoint": preempted.checkpoint, "saved": exists, "said": said[-1]}
    return {}


@pytest.mark.parametrize(("ours", "number", "refuses"), [(True, signal.SIGUSR1, False), (False, signal.SIGUSR2, True)])
def test_the_requeue_signal_of_a_slurm_job_saves_where_lightning_looks_and_requeues_it(tmp_path, ours, number, refuses):
    """Also if the job is a single task, which is no rank of a cluster; what Slurm answers is said."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    answers = "echo 'Job is disabled' >&2; exit 1" if refuses else ""
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{answers}\n')
    scontrol.chmod(0o755)
    env = {"PATH": f"{scontrol.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}
    env |= dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    env |= {"SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_NAME": "train"}
    (value,) = run_ranks(1, requeued_by_slurm, str(tmp_path), ours, number, backend=None, env=env, timeout=90)
    path = value["checkpoint"]
    assert value["saved"] and Path(path).name.startswith("hpc_ckpt_")
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    answer = f"Slurm was asked to requeue the job, to resume from {path}"
    if refuses:
        refused = "scontrol requeue 7: Job is disabled"
        answer = f"Slurm did not requeue the job ({refused}): submit it again, to resume from {path}"
    assert answer in value["said"]


def told_to_end(folder: str) -> int | None:
    try:
        fit(Module(act=terminate_on(0, 0, 4)), [], folder, strategy="lockstep_ddp")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else None
    return 0


def test_without_the_callback_sigterm_to_a_single_process_is_no_success(tmp_path):
    (outcome,) = run_ranks_raw(1, told_to_end, str(tmp_path), backend=None, timeout=90)
    assert outcome.value == 128 + signal.SIGTERM


def stop_file(folder: str) -> dict[str, Any]:
    def act(module: Module, batch_idx: int) -> None:
        if batch_idx == 2 and module.current_epoch == 0:
            Path(folder, "stop").touch()
        time.sleep(0.03)  # the file is looked for each second, and a batch takes none

    module = Module(act=act)
    callback = StopTogether(stop_file="stop", exit_code=None)
    fit(module, [callback], folder)
    return {
        "batches": len(module.seen),
        "reason": callback.decision.reason,
        "file": Path(folder, "stop").exists(),
        "saved": Path(folder, "checkpoints", "preempted.ckpt").exists(),
    }


def test_a_stop_file(tmp_path):
    (value,) = run_ranks(1, stop_file, str(tmp_path), backend=None, timeout=90)
    assert 3 <= value["batches"] < 6 * BATCHES and "found the stop file" in value["reason"]
    assert value["saved"] and not value["file"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"signals": "SIGTERM"}, "expected a list"),
        ({"signals": ["SIGKILL"]}, "'SIGKILL'"),
        ({"exit_code": 300}, "exit_code=300"),
        ({"filename": "a/b"}, "filename='a/b'"),
    ],
)
def test_bad_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        StopTogether(**arguments)
