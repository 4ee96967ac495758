"""What a first run on a card needs: all callbacks at once, failures that all ranks are told of, the CPU's numbers."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_lockstep as lockstep
from lightning_lockstep import LockstepDDPStrategy
from tests.harness import kill_self, run_ranks, run_ranks_raw, run_script
from tests.models.strategies.fsdp_models import LogsLoss, Net, difference, fit, loader, weights

# -- Every callback at once --

EVERY = {
    "AutoBatchSize": {"mode": "off", "on_oom": "split"},
    "FP32Modules": {"modules": ["head"]},
    "OverflowDetector": {},
    "RankOrderedLogging": {"files": None},
    "ReplicaCheck": {"every_n_steps": 5, "audit_every_n_steps": 10},
    "StaticShapes": {},
    "StopTogether": {},
    "StragglerMonitor": {"every_n_steps": 5},
    "SyncedEarlyStopping": {"monitor": "loss", "patience": 99},
}


def with_every_callback(ranks: int, folder: str) -> tuple[float, int, str]:
    options = {"max_epochs": 5, "default_root_dir": folder}
    plain = fit(LogsLoss, ranks, LockstepDDPStrategy(guard="off"), **options)
    callbacks = [getattr(lockstep, name)(**settings) for name, settings in EVERY.items()]
    watched = fit(LogsLoss, ranks, LockstepDDPStrategy(), callbacks=callbacks, **options)
    return difference(weights(plain), weights(watched)), watched.global_step, dist.get_backend()


# -- The numbers --


def numbers(strategy: Any, ranks: int, **options: Any) -> tuple[dict[str, torch.Tensor], float]:
    """The weights of a fit, and the loss of an evaluation after it."""
    trainer = fit(Net, ranks, strategy, **options)
    (measured,) = trainer.validate(trainer.lightning_module, loader(ranks), verbose=False)
    return {name: value.cpu() for name, value in weights(trainer).items()}, measured["val"]


def beside_the_cpu(ranks: int) -> tuple[float, float, float]:
    here, loss = numbers(LockstepDDPStrategy(), ranks)
    expected, expected_loss = numbers(None, 1, accelerator="cpu", devices=1)
    ignored = {name for name in expected if "calls" in name}  # of a buffer that counts batches, of another size here
    kept = [{k: v for k, v in one.items() if k not in ignored} for one in (here, expected)]
    return difference(*kept), loss, expected_loss


def healthy(ranks: int, folder: str) -> tuple[Any, Any]:
    return with_every_callback(ranks, folder), beside_the_cpu(ranks)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def answers(request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = str(tmp_path_factory.mktemp("runs"))
    return run_ranks(request.param, healthy, request.param, folder, backend=None, timeout=120)


def test_every_callback_at_once_changes_no_weight(answers: list[Any], device: str) -> None:
    backend = "nccl" if device == "cuda" and len(answers) <= torch.cuda.device_count() else "gloo"
    assert [watched for watched, _ in answers] == [(0.0, 20, backend)] * len(answers)


def test_fit_and_evaluation_are_those_of_one_process_on_the_cpu(answers: list[Any]) -> None:
    check_numbers([numbers for _, numbers in answers])


def check_numbers(answers: list[tuple[float, float, float]]) -> None:
    for distance, loss, expected in answers:
        assert distance < 1e-4
        assert loss == pytest.approx(expected, abs=1e-4) == pytest.approx(answers[0][1], abs=1e-4)


# -- Failures --


class Fails(Net):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            last = self.global_rank == 1
            if last and self.fault == "raises":
                raise ValueError("boom")
            if last and self.fault == "is killed":
                kill_self()
            if self.fault == "gathers another shape":
                given = torch.ones(2 if last else 3, device=self.device)
                dist.all_gather([torch.empty_like(given) for _ in range(2)], given)
            if self.fault == "calls something else":
                value = torch.ones(2, device=self.device)
                dist.broadcast(value, 0) if last else dist.all_reduce(value)
        return super().training_step(batch, batch_idx)


def failing_fit(fault: str, guard: str) -> str:
    try:
        fit(lambda: Fails(fault), 2, LockstepDDPStrategy(guard=guard, stall_timeout=3.0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def fits_that_part() -> list[str]:
    """Ranks that call different things: under ``verify`` they can go on after that, under ``watch`` they cannot."""
    return [failing_fit("gathers another shape", "verify"), failing_fit("calls something else", "watch")]


def test_ranks_that_call_different_things_raise_the_same(device: str) -> None:
    first, second = run_ranks(2, fits_that_part, backend=None, timeout=60)
    assert first == second
    assert re.search(r"all_gather .*\(3,\).*all_gather .*\(2,\)", first[0], re.DOTALL), first
    assert re.search("all_reduce.*broadcast from 0", first[1], re.DOTALL), first
    # That a rank never comes: test_fits.py


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("raises", "rank 1 of 2 .* failed at epoch 0, step 2.*ValueError: boom"),
        ("is killed", "rank 1 of 2 .*(was lost|was killed)"),
    ],
)
def test_the_other_rank_is_told_what_went_wrong(fault: str, expected: str, device: str) -> None:
    first, second = run_ranks_raw(2, failing_fit, fault, "verify", backend=None, timeout=60)
    assert re.search(expected, first.value or "", re.DOTALL), (first, second)
    assert (second.value or "").startswith("ValueError") == (fault == "raises"), second
    assert (second.value is None) == (fault == "is killed"), second


# -- The doctor --


def test_the_doctor_sees_the_device(device: str) -> None:
    outcome = run_script([sys.executable, "-m", "lightning_lockstep.doctor"], timeout=120)
    assert "Traceback" not in outcome.output and outcome.returncode in (0, 1), outcome.output
    if device == "cuda":
        assert torch.cuda.get_device_name(0) in outcome.stdout, outcome.output
    print(outcome.stdout)  # which a log of `pytest -rP` keeps
