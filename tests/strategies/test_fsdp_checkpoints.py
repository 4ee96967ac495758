"""Checkpoints of LockstepFSDPStrategy: plain files for any strategy, folders of parts for any number of ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep._doors.lightning import ModelCheckpoint, Trainer
from lightning_lockstep.deepspeed.checkpoints.command import main as consolidate
from tests.helpers import kill_self, run_ranks, run_ranks_raw
from tests.strategies.fsdp_models import QUIET, Net, difference, fit, fsdp, loader, rows, weights


def resumed(ranks: int, path: Path, strategy: Any = None, **options: Any) -> Trainer:
    """Go on with a checkpoint for a third epoch."""
    net = Net()
    trainer = Trainer(
        **{**QUIET, "max_epochs": 3, "devices": ranks, **options},
        strategy=strategy if strategy is not None else "auto",
    )
    trainer.fit(net, loader(ranks), ckpt_path=path)
    return trainer


def saved_and_resumed(folder: Path) -> dict[str, float]:
    """Two epochs, a checkpoint, and a third epoch under each strategy; the largest difference from one process."""
    reference = weights(fit(Net, 1, max_epochs=3))
    alone, full, parts = folder / "alone.ckpt", folder / "full.ckpt", folder / "parts.ckpt"
    fit(Net, 1).save_checkpoint(alone)
    fit(Net, 2, fsdp()).save_checkpoint(full)
    fit(Net, 2, fsdp(state_dict="sharded")).save_checkpoint(parts)
    answers = {}
    for name, path, ranks, strategy in (
        ("full, one process", full, 1, None),
        ("full, DDP", full, 2, LockstepDDPStrategy()),
        ("full, FSDP in other units", full, 2, fsdp(shard="auto")),
        ("one process, FSDP", alone, 2, fsdp()),
        ("parts, FSDP", parts, 2, fsdp()),
        ("parts, FSDP in other units", parts, 2, fsdp(shard=["Linear"], state_dict="sharded")),
    ):
        trainer = resumed(ranks, path, strategy)
        assert trainer.global_step == 12
        found = weights(trainer) if name != "parts, FSDP in other units" else whole(trainer)
        answers[name] = difference(reference, found) if trainer.is_global_zero else 0.0
    return answers


def whole(trainer: Trainer) -> dict[str, Any]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in trainer.strategy.lightning_module_state_dict().items()
    }


def test_a_fit_goes_on_under_any_strategy(tmp_path: Path) -> None:
    answers = run_ranks(2, saved_and_resumed, tmp_path, backend=None, timeout=180)
    for rank in answers:
        assert {name: value for name, value in rank.items() if value > 1e-5} == {}


def parts_of_one_run(folder: Path, path: Path | None) -> Any:
    """Save parts on as many ranks as there are, or go on with those of others."""
    ranks = int(os.environ["WORLD_SIZE"])
    if path is None:
        fit(Net, ranks, fsdp(state_dict="sharded")).save_checkpoint(folder / "parts.ckpt")
        return None
    trainer = resumed(ranks, path, fsdp())
    found = weights(trainer)
    return found if trainer.is_global_zero else None


def test_parts_are_read_on_another_number_of_ranks_and_joined(tmp_path: Path) -> None:
    run_ranks(4, parts_of_one_run, tmp_path, None, backend=None, timeout=120)
    path = tmp_path / "parts.ckpt"
    found = run_ranks(2, parts_of_one_run, tmp_path, path, backend=None, timeout=120)[0]
    assert consolidate([str(path)]) == 0
    plain = tmp_path / "parts.consolidated.ckpt"
    two_epochs, three_epochs, gone_on = run_ranks(1, alone, plain, backend=None, timeout=120)[0]
    assert difference(three_epochs, found) < 1e-5
    assert difference(two_epochs, torch.load(plain, weights_only=True)["state_dict"]) < 1e-5
    assert difference(three_epochs, gone_on) < 1e-5, "the optimizer's state is in it"


def alone(plain: Path) -> Any:
    """Weights of one process after two epochs, after three, and after a third one from a file."""
    return weights(fit(Net, 1)), weights(fit(Net, 1, max_epochs=3)), weights(resumed(1, plain))


def evaluated(folder: Path) -> dict[str, Any]:
    trainer = fit(Net, 2, fsdp())
    trainer.save_checkpoint(folder / "full.ckpt")
    trainer.strategy.settings = fsdp(state_dict="sharded").settings
    trainer.save_checkpoint(folder / "parts.ckpt")
    data = DataLoader(rows(16), 4)
    answers: dict[str, Any] = {}
    for name, kind, strategy in (
        ("fsdp", "full", fsdp()),
        ("fsdp", "parts", fsdp()),
        ("ddp", "full", LockstepDDPStrategy()),
    ):
        trainer = Trainer(**QUIET, devices=2, strategy=strategy)
        path = folder / f"{kind}.ckpt"
        answers[f"{name} {kind}"] = (
            trainer.validate(Net(), data, ckpt_path=path, verbose=False)[0]["val"],
            trainer.test(Net(), data, ckpt_path=path, verbose=False)[0]["val"],
            torch.cat(trainer.predict(Net(), data, ckpt_path=path)).sum().item(),
        )
    return answers


def test_evaluation_alone_takes_either_kind(tmp_path: Path) -> None:
    first, second = run_ranks(2, evaluated, tmp_path, backend=None, timeout=120)
    assert first["fsdp full"] == pytest.approx(first["ddp full"], abs=1e-5)
    assert first["fsdp parts"] == first["fsdp full"] == second["fsdp full"]


def kept_best(folder: Path, kind: str) -> Any:
    callback = ModelCheckpoint(folder / kind, monitor="val", save_top_k=1, save_last=True)
    trainer = Trainer(
        **{**QUIET, "max_epochs": 3, "devices": 2, "enable_checkpointing": True},
        strategy=fsdp(state_dict=kind),
        callbacks=[callback],
    )
    trainer.fit(Net(), loader(2), DataLoader(rows(16), 4))
    best = trainer.test(Net(), DataLoader(rows(16), 4), ckpt_path="best", verbose=False)[0]["val"]
    assert callback.best_model_score is not None
    return float(callback.best_model_score), best, sorted(os.listdir(folder / kind))


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_model_checkpoint_keeps_the_best(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, kept_best, tmp_path, kind, backend=None, timeout=120)
    assert first[:2] == second[:2]
    assert first[0] == pytest.approx(first[1], abs=1e-6)
    assert len(first[2]) == 2 and "last.ckpt" in first[2], "the best before it is gone"


def killed_while_saving(folder: Path) -> None:
    trainer = fit(Net, 2, fsdp(state_dict="sharded"))
    trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.global_rank == 1:
        torch.distributed.checkpoint.save = lambda *args, **kwargs: kill_self()
    trainer.save_checkpoint(folder / "last.ckpt")


def test_a_save_that_is_killed_leaves_the_last_one_whole(tmp_path: Path) -> None:
    outcomes = run_ranks_raw(2, killed_while_saving, tmp_path, backend=None, timeout=60)
    assert not any(outcome.ok for outcome in outcomes)
    plain = tmp_path / "plain.ckpt"
    assert consolidate([str(tmp_path / "last.ckpt"), "--output", str(plain)]) == 0
    _, three_epochs, gone_on = run_ranks(1, alone, plain, backend=None, timeout=120)[0]
    assert difference(three_epochs, gone_on) < 1e-5
