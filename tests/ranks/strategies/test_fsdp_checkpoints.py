"""Checkpoints of LockstepFSDPStrategy: plain files for any strategy, folders of parts for any number of ranks."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy
from lightning_lockstep._doors.lightning import ModelCheckpoint, Trainer
from lightning_lockstep.deepspeed.checkpoints.command import main as consolidate
from lightning_lockstep.distributed import checkpoint_folder
from tests.common.strategies.fsdp_models import QUIET, Net, difference, fit, fsdp, loader, rows, weights
from tests.helpers import kill_self, run_ranks, run_ranks_raw


def resumed(
    ranks: int, path: Path, strategy: Any = None, make: Callable[[], Net] = Net, **options: Any
) -> Trainer:
    """Go on with a checkpoint for a third epoch."""
    trainer = Trainer(
        **{**QUIET, "max_epochs": 3, "devices": ranks}, strategy=strategy if strategy is not None else "auto"
    )
    trainer.fit(make(), loader(ranks), ckpt_path=path, **options)
    return trainer


class Renaming(Net):
    """Writes names that its own modules do not have, and takes them back when it reads them."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        bare = {name.removeprefix("old."): value for name, value in state.items()}
        return super().load_state_dict(bare, *args, **kwargs)


def saved_and_resumed(folder: Path) -> dict[str, float]:
    """Two epochs, a checkpoint, and a third epoch under each strategy; the largest difference from one process."""
    reference = weights(fit(Net, 1, max_epochs=3))
    alone, full, parts = folder / "alone.ckpt", folder / "full.ckpt", folder / "parts.ckpt"
    fit(Net, 1).save_checkpoint(alone)
    fit(Net, 2, fsdp()).save_checkpoint(full)
    fit(Net, 2, fsdp(state_dict="sharded")).save_checkpoint(parts)
    fit(Renaming, 2, fsdp()).save_checkpoint(folder / "renamed.ckpt")
    answers = {}
    for name, path, ranks, strategy in (
        ("full, one process", full, 1, None),
        ("full, DDP", full, 2, LockstepDDPStrategy()),
        ("full, FSDP in other units", full, 2, fsdp(shard="auto")),
        ("one process, FSDP", alone, 2, fsdp()),
        ("parts, FSDP", parts, 2, fsdp()),
        ("parts, FSDP in other units", parts, 2, fsdp(shard=["Linear"], state_dict="sharded")),
        ("names of its own, FSDP", folder / "renamed.ckpt", 2, fsdp()),
    ):
        trainer = resumed(ranks, path, strategy, Renaming if path.name == "renamed.ckpt" else Net)
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


#: Two copies of the model, each divided in two.
HSDP = {"shard": 2, "replicate": 2}


def saved_on_four(folder: Path) -> Any:
    fit(Net, 4, fsdp(state_dict="sharded")).save_checkpoint(folder / "parts.ckpt")
    trainer = fit(Net, 4, fsdp(mesh=HSDP))
    trainer.save_checkpoint(folder / "copies.ckpt")
    found = weights(trainer)
    fit(Net, 4, fsdp(mesh=HSDP, state_dict="sharded")).save_checkpoint(folder / "parts of copies.ckpt")
    return found if trainer.is_global_zero else None


def gone_on_with(paths: list[Path]) -> Any:
    trainers = [resumed(2, path, fsdp()) for path in paths]
    found = [weights(trainer) for trainer in trainers]
    return found if trainers[0].is_global_zero else None


def test_what_four_ranks_save_is_read_on_two_and_joined(straight: Any, tmp_path: Path) -> None:
    of_copies = run_ranks(4, saved_on_four, tmp_path, backend=None, timeout=120)[0]
    paths = [tmp_path / f"{name}.ckpt" for name in ("parts", "copies", "parts of copies")]
    found = run_ranks(2, gone_on_with, paths, backend=None, timeout=120)[0]
    assert consolidate([str(paths[0])]) == 0
    plain = tmp_path / "parts.consolidated.ckpt"
    gone_on = run_ranks(1, gone_on_alone, plain, backend=None, timeout=120)[0]
    two_epochs, three_epochs = straight
    assert difference(two_epochs, of_copies) < 1e-5
    assert [difference(three_epochs, one) < 1e-5 for one in found] == [True] * 3
    assert difference(two_epochs, saved_weights(plain)) < 1e-5
    assert difference(three_epochs, gone_on) < 1e-5, "the optimizer's state is in it"


def alone() -> Any:
    return [weights(fit(Net, 1, max_epochs=epochs)) for epochs in (2, 3)]


@pytest.fixture(scope="module")
def straight() -> Any:
    """Weights of one process after two epochs and after three."""
    return run_ranks(1, alone, backend=None, timeout=120)[0]


def gone_on_alone(plain: Path) -> Any:
    return weights(resumed(1, plain))


def saved_weights(plain: Path) -> Any:
    return torch.load(plain, weights_only=True)["state_dict"]


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


def test_a_save_that_is_killed_leaves_the_last_one_whole(straight: Any, tmp_path: Path) -> None:
    outcomes = run_ranks_raw(2, killed_while_saving, tmp_path, backend=None, timeout=60)
    assert not any(outcome.ok for outcome in outcomes)
    plain = tmp_path / "plain.ckpt"
    assert consolidate([str(tmp_path / "last.ckpt"), "--output", str(plain)]) == 0
    assert difference(straight[0], saved_weights(plain)) < 1e-5


def killed_while_replacing(folder: Path, exchanges: bool) -> None:
    """Rank 0 ends when the new folder has, or has not yet, taken the name."""
    trainer = fit(Net, 2, fsdp(state_dict="sharded"))
    trainer.save_checkpoint(folder / "last.ckpt")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        return kill_self() if path.suffix == ".writing" else rename(path, target)  # type: ignore[func-returns-value]

    if trainer.is_global_zero and exchanges:
        checkpoint_folder._remove = lambda path: kill_self()
    elif trainer.is_global_zero:  # a disk that cannot exchange names
        checkpoint_folder._exchange = lambda one, other: False
        Path.rename = renamed  # type: ignore[method-assign,assignment]
    trainer.save_checkpoint(folder / "last.ckpt")


def read_and_replaced(path: Path) -> Any:
    trainer = resumed(2, path, fsdp(state_dict="sharded"))
    found = whole(trainer)
    trainer.save_checkpoint(path)
    return found


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_replacement_that_is_killed_leaves_one_that_is_found(
    exchanges: bool, straight: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plain = tmp_path / "last.ckpt", tmp_path / "plain.ckpt"
    outcomes = run_ranks_raw(2, killed_while_replacing, tmp_path, exchanges, backend=None, timeout=60)
    assert not any(outcome.ok for outcome in outcomes)
    kept = "last.ckpt" if exchanges else "last.ckpt.before"
    assert sorted(os.listdir(tmp_path)) == [kept, "last.ckpt.writing"]
    assert consolidate([str(path), "--output", str(plain)]) == 0
    said = "last.ckpt.before, as a save that was to replace it was killed" in capsys.readouterr().err
    assert said != exchanges
    assert difference(straight[0], saved_weights(plain)) < 1e-5
    if not exchanges:
        found = run_ranks(2, read_and_replaced, path, backend=None, timeout=120)[0]
        assert difference(straight[1], found) < 1e-5
        assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "plain.ckpt"]


# -- What a folder may not hold, or is not read for --


class Fewer(Net):
    """Its optimizer is for some of the parameters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), 0.01)


class Grouped(Net):
    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.Adam([{"params": [first]}, {"params": others}], 0.01)


def limited(path: Path) -> None:
    """Save where rank 1 has no space: its files may not grow."""
    rank, limits = int(os.environ["RANK"]), resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = fit(Net, 2, fsdp(state_dict="sharded"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if rank else limits[0], limits[1]))
    try:
        trainer.save_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def damaged(folder: Path, file: str) -> Path:
    """A copy of the folder of parts in which a file ends too early."""
    to = folder / f"{file}.ckpt"
    if os.environ["RANK"] == "0":
        shutil.copytree(folder / "parts.ckpt", to)
        os.truncate(to / file, (to / file).stat().st_size // 2)
    torch.distributed.barrier()
    return to


def refused(folder: Path) -> dict[str, str]:
    rank = int(os.environ["RANK"])
    sharded = {"state_dict": "sharded"}
    trainer = fit(Net, 2, fsdp(**sharded))
    trainer.save_checkpoint(folder / "parts.ckpt")
    fit(Net, 2, fsdp()).save_checkpoint(folder / "full.ckpt")
    of_this_rank = (folder / "parts.ckpt", folder / "elsewhere.ckpt")[rank]
    answers = {}
    for name, act in {
        "seen by one rank": lambda: resumed(2, of_this_rank, fsdp()),
        "an address": lambda: trainer.save_checkpoint("memory://bucket/last.ckpt"),
        "an address by default": lambda: fit(
            Net, 2, fsdp(**sharded), enable_checkpointing=True, default_root_dir="memory://bucket"
        ),
        "fewer, parts": lambda: resumed(2, folder / "parts.ckpt", fsdp(), Fewer),
        "fewer, full": lambda: resumed(2, folder / "full.ckpt", fsdp(), Fewer),
        "grouped, parts": lambda: resumed(2, folder / "parts.ckpt", fsdp(), Grouped),
        "grouped, full": lambda: resumed(2, folder / "full.ckpt", fsdp(), Grouped),
        "no space on one rank": lambda: limited(folder / "parts.ckpt"),
        "a damaged part": lambda: resumed(2, damaged(folder, "__1_0.distcp"), fsdp()),
        "a damaged rest": lambda: resumed(2, damaged(folder, "lightning.pt"), fsdp()),
        "a damaged table": lambda: resumed(2, damaged(folder, ".metadata"), fsdp()),
        "what was there": lambda: resumed(2, folder / "parts.ckpt", fsdp()),
    }.items():
        try:
            act()
            answers[name] = "nothing"
        except (ConfigurationError, OSError) as error:  # noqa: PERF203
            answers[name] = str(error)
    return answers


def test_what_cannot_be_read_or_written_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    first, second = run_ranks(2, refused, tmp_path, backend=None, timeout=120)
    assert first == second
    for name, expected in {
        "seen by one rank": "parts.ckpt: there is a folder of parts on rank 0, nothing on rank 1: expected one",
        "an address": "memory://bucket/last.ckpt and state_dict='sharded': expected a folder on a disk",
        "an address by default": "ModelCheckpoint with dirpath=memory://bucket",
        "fewer, parts": "an optimizer for 12 parameters, and Adam is for 1 parameters: expected as many",
        "fewer, full": "an optimizer for 12 parameters, and Adam is for 1 parameters: expected as many",
        "grouped, parts": "for 12 parameters, and Adam is for 12 parameters in 2 groups of 1, 11: expected",
        "grouped, full": "for 12 parameters, and Adam is for 12 parameters in 2 groups of 1, 11: expected",
        "no space on one rank": "parts.ckpt.writing cannot be written by rank 1: ",
        "a damaged part": "__1_0.distcp.ckpt cannot be read by rank 1: ",
        "a damaged rest": "lightning.pt.ckpt/lightning.pt cannot be read: ",
        "a damaged table": ".metadata.ckpt/.metadata cannot be read: ",
        "what was there": "nothing",
    }.items():
        assert expected in first[name], (name, first[name])


class Thing:
    """An object that only pickled code can make."""


class Planted:
    """Leaves a file when it is read, and is what was there before."""

    def __init__(self, marker: Path, table: bytes) -> None:
        self.found = marker, table

    def __reduce__(self) -> Any:
        return plant, self.found


def plant(marker: Path, table: bytes) -> Any:
    marker.touch()
    return pickle.loads(table)


class Keeps(Net):
    """Puts an object into its checkpoints, and a divided tensor at the top of them."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(thing=Thing(), mine=self.head.weight)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = type(checkpoint["thing"]).__name__, checkpoint["mine"].shape


def with_pickles(folder: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    trusted = {"weights_only": False}
    fit(Keeps, 2, fsdp(state_dict="sharded")).save_checkpoint(folder / "object.ckpt")
    fit(Net, 2, fsdp(state_dict="sharded")).save_checkpoint(folder / "table.ckpt")
    table = folder / "table.ckpt" / ".metadata"
    if os.environ["RANK"] == "0":
        table.write_bytes(pickle.dumps(Planted(folder / "marker", table.read_bytes())))
    torch.distributed.barrier()
    for name, make in (("object", Keeps), ("table", Net)):
        try:
            resumed(2, folder / f"{name}.ckpt", fsdp(), make)
        except ConfigurationError as error:  # noqa: PERF203
            answers[name] = str(error)
    torch.distributed.barrier()
    answers["run"] = (folder / "marker").exists()
    trainer = resumed(2, folder / "object.ckpt", fsdp(), Keeps, **trusted)
    answers["object, trusted"] = trainer.lightning_module.found
    answers["table, trusted"] = resumed(2, folder / "table.ckpt", fsdp(), Net, **trusted).global_step
    return answers


def test_pickled_code_runs_only_where_it_is_trusted(tmp_path: Path) -> None:
    for found in run_ranks(2, with_pickles, tmp_path, backend=None, timeout=120):
        assert "tests.ranks.strategies.test_fsdp_checkpoints.Thing" in found["object"]
        assert (
            ".metadata: names tests.ranks.strategies.test_fsdp_checkpoints.plant, which torch"
            in found["table"]
        )
        assert found["run"] is False
        assert found["object, trusted"] == ("Thing", (4, 8)) and found["table, trusted"] == 12
    assert (tmp_path / "marker").exists()


# -- Versions of modules, by which they load what older ones have saved --


class Versioned(nn.Linear):
    """In its first version it kept the opposite of its weight."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)


class OfVersion2(Net):
    def make_layers(self, blocks: int = 2) -> None:
        super().make_layers(blocks)
        self.first = Versioned(8, 8)


def versions(folder: Path) -> dict[str, bool]:
    paths = {"full": folder / "full.ckpt", "parts": folder / "parts.ckpt"}
    fit(OfVersion2, 2, fsdp()).save_checkpoint(paths["full"])
    fit(OfVersion2, 2, fsdp(state_dict="sharded")).save_checkpoint(paths["parts"])
    saved = torch.load(paths["full"], weights_only=True)["state_dict"]
    answers = {}
    for kind, strategy in (("full", fsdp()), ("parts", fsdp()), ("full", LockstepDDPStrategy())):
        trainer = Trainer(**QUIET, devices=2, strategy=strategy)
        trainer.validate(OfVersion2(), DataLoader(rows(16), 4), ckpt_path=paths[kind], verbose=False)
        found = weights(trainer).get("first.weight")  # None: this is not rank 0
        same = found is None or torch.equal(found, saved["first.weight"])
        answers[f"{kind}, {type(strategy).__name__}"] = same
    return answers


def test_checkpoints_keep_the_versions_of_modules(tmp_path: Path) -> None:
    first, _ = run_ranks(2, versions, tmp_path, backend=None, timeout=120)
    assert len(first) == 3 and all(first.values()), first
    assert consolidate([str(tmp_path / "parts.ckpt")]) == 0
    plain = torch.load(tmp_path / "parts.consolidated.ckpt", weights_only=True)["state_dict"]
    assert plain._metadata["first"] == {"version": 2}
