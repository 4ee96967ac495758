"""Checkpoints of LockstepFSDPStrategy: plain files for any strategy, folders of parts for any number of ranks."""

from __future__ import annotations

import io
import os
import resource
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_lockstep import LockstepDDPStrategy
from lightning_lockstep._lightning import ModelCheckpoint, Trainer
from lightning_lockstep.deepspeed.checkpoints.command import main as consolidate
from tests.harness import kill_self, run_ranks, run_ranks_raw
from tests.models.strategies.fsdp_models import QUIET, Net, difference, fit, fsdp, loader, rows, weights
from tests.ranks.strategies.test_fsdp import Even, MadeLater


def resumed(ranks: int, path: Path, strategy: Any = None, make: Callable[[], Net] = Net, **options: Any) -> Trainer:
    """Go on with a checkpoint for a third epoch."""
    trainer = Trainer(
        **{**QUIET, "max_epochs": 3, "devices": ranks}, strategy=strategy if strategy is not None else "auto"
    )
    trainer.fit(make(), loader(ranks), ckpt_path=path, **options)
    return trainer


class Versioned(nn.Linear):
    """In its first version it kept the opposite of its weight."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        if metadata.get("version") != 2:
            state[f"{prefix}weight"] = -state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *args)


class Saved(Net):
    """Loses its weights in a checkpoint that does not keep the versions of modules."""

    def make_layers(self, blocks: int = 2) -> None:
        super().make_layers(blocks)
        self.first = Versioned(8, 8)


class Renaming(Net):
    """Writes names that its own modules do not have, and takes them back when it reads them."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        bare = {name.removeprefix("old."): value for name, value in state.items()}
        return super().load_state_dict(bare, *args, **kwargs)


# -- Four ranks: copies of a model (HSDP), and parts that other numbers of ranks read --

#: Two copies of the model, each divided in two.
HSDP = {"shard": 2, "replicate": 2}


class Drawn(Even):
    """Each rank draws the first values of its part."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().normal_(0, 0.3)


class DividesCopies(MadeLater):
    """Made on ``meta`` and divided by itself, with other first values on each rank."""

    def configure_model(self) -> None:
        super().configure_model()
        self.first, self.head = Drawn(8, 8, device="meta"), Drawn(8, 4, device="meta")
        for block in self.blocks:
            block.linear = Drawn(8, 8, device="meta")
        for part in (*self.blocks, self):
            fully_shard(part, mesh=self.device_mesh)
        torch.manual_seed(self.global_rank)


def saved_on_four(folder: Path) -> Any:
    fit(Saved, 4, fsdp(state_dict="sharded")).save_checkpoint(folder / "parts.ckpt")
    trainer = fit(Saved, 4, fsdp(mesh=HSDP))
    trainer.save_checkpoint(folder / "copies.ckpt")
    found = weights(trainer)
    trainer.strategy.settings = fsdp(state_dict="sharded").settings
    trainer.save_checkpoint(folder / "parts of copies.ckpt")
    net = DividesCopies()
    fit(lambda: net, 4, fsdp(mesh=HSDP), max_epochs=1)
    digest = [float(p.to_local().double().sum()) for p in net.parameters()]  # type: ignore[attr-defined]
    return (found, weights(fit(Saved, 1)), digest) if trainer.is_global_zero else (None, None, digest)


class Four(NamedTuple):
    """What four ranks have come to, and the folder of their checkpoints."""

    folder: Path
    answers: list[Any]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Four:
    folder = tmp_path_factory.mktemp("four")
    return Four(folder, run_ranks(4, saved_on_four, folder, backend=None, timeout=120))


def test_copies_of_a_model_have_the_weights_of_one_process(four: Four) -> None:
    found, straight, _ = four.answers[0]
    assert difference(found, straight) < 1e-5
    digests = [digest for *_, digest in four.answers]
    assert digests[0] == digests[2] and digests[1] == digests[3], "ranks 0 and 1 have the first copy"


# -- A fit goes on --


def saved_and_resumed(folder: Path, of_four: Path) -> dict[str, float]:
    """Two epochs, a checkpoint, and a third epoch under each strategy; the largest difference from one process."""
    references = {make: weights(fit(make, 1, max_epochs=3)) for make in (Saved, Renaming)}
    plain = folder / "parts.consolidated.ckpt"
    if os.environ["RANK"] == "0":
        assert consolidate([str(of_four / "parts.ckpt"), "--output", str(plain)]) == 0
    alone, full, parts = folder / "alone.ckpt", folder / "full.ckpt", folder / "parts.ckpt"
    fit(Saved, 1).save_checkpoint(alone)
    fit(Saved, 2, fsdp()).save_checkpoint(full)
    fit(Saved, 2, fsdp(state_dict="sharded")).save_checkpoint(parts)
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
        ("parts of four ranks", of_four / "parts.ckpt", 2, fsdp()),
        ("copies of four ranks", of_four / "copies.ckpt", 2, fsdp()),
        ("parts of copies of four ranks", of_four / "parts of copies.ckpt", 2, fsdp()),
        ("consolidated parts of four ranks, one process", plain, 1, None),
    ):
        make = Renaming if path.name == "renamed.ckpt" else Saved
        trainer = resumed(ranks, path, strategy, make)
        assert trainer.global_step == 12
        found = weights(trainer) if name != "parts, FSDP in other units" else whole(trainer)
        answers[name] = difference(references[make], found) if trainer.is_global_zero else 0.0
    two_epochs = weights(fit(Saved, 1))
    consolidated = torch.load(plain, weights_only=True)["state_dict"]
    return {**answers, "consolidated": difference(two_epochs, consolidated)}


def whole(trainer: Trainer) -> dict[str, Any]:
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in trainer.strategy.lightning_module_state_dict().items()
    }


class Goes(NamedTuple):
    folder: Path
    answers: list[dict[str, float]]


@pytest.fixture(scope="module")
def gone_on(four: Four, tmp_path_factory: pytest.TempPathFactory) -> Goes:
    folder = tmp_path_factory.mktemp("goes_on")
    return Goes(folder, run_ranks(2, saved_and_resumed, folder, four.folder, backend=None, timeout=180))


def test_a_fit_goes_on_under_any_strategy_and_number_of_ranks(gone_on: Goes) -> None:
    for differences in gone_on.answers:
        assert len(differences) == 12
        assert {name: value for name, value in differences.items() if value > 1e-5} == {}


def test_parts_are_one_folder(gone_on: Goes, capsys: pytest.CaptureFixture[str]) -> None:
    parts, output = gone_on.folder / "parts.ckpt", gone_on.folder / "of two.ckpt"
    assert consolidate([str(parts), str(gone_on.folder / "none.ckpt"), "--output", str(output)]) == 2
    assert "parts.ckpt: is not a DeepSpeed checkpoint" in capsys.readouterr().err and not output.exists()


# -- What is read, and what is refused --


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
        except (ValueError, OSError) as error:  # noqa: PERF203
            answers[name] = str(error)
    return answers


def killed_while_replacing(folder: Path) -> None:
    """Rank 0 ends when the old folder has given up the name."""
    trainer = fit(Net, 2, fsdp(state_dict="sharded"))
    trainer.save_checkpoint(folder / "last.ckpt")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        return kill_self() if path.suffix == ".writing" else rename(path, target)  # type: ignore[func-returns-value]

    if trainer.is_global_zero:
        Path.rename = renamed  # type: ignore[method-assign,assignment]
    trainer.save_checkpoint(folder / "last.ckpt")


class Killed(NamedTuple):
    """What a save leaves that is killed, and what the command says that makes a plain file of it."""

    path: Path
    left: list[str]
    said: str


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    folder = tmp_path_factory.mktemp("killed")
    outcomes = run_ranks_raw(2, killed_while_replacing, folder, backend=None, timeout=60)
    assert not any(outcome.ok for outcome in outcomes)
    left, said = sorted(os.listdir(folder)), io.StringIO()
    with redirect_stderr(said):
        assert consolidate([str(folder / "last.ckpt"), "--output", str(folder / "plain.ckpt")]) == 0
    return Killed(folder / "last.ckpt", left, said.getvalue())


def read_and_refused(folder: Path, of_killed: Path) -> dict[str, Any]:
    trainer = resumed(2, of_killed, fsdp(state_dict="sharded"))
    found = whole(trainer)
    trainer.save_checkpoint(of_killed)
    differences = difference(weights(fit(Net, 1, max_epochs=3)), found)
    return {
        "killed": differences,
        "evaluated": evaluated(folder),
        "best": {kind: kept_best(folder, kind) for kind in ("full", "sharded")},
        "refused": refused(folder),
    }


class Read(NamedTuple):
    folder: Path
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module")
def read(killed: Killed, tmp_path_factory: pytest.TempPathFactory) -> Read:
    folder = tmp_path_factory.mktemp("read")
    return Read(folder, run_ranks(2, read_and_refused, folder, killed.path, backend=None, timeout=180))


def test_a_replacement_that_is_killed_leaves_one_that_is_found(killed: Killed) -> None:
    assert killed.left == ["last.ckpt.before", "last.ckpt.writing"]
    assert "last.ckpt.before, because the save that should have replaced it was killed" in killed.said


def test_a_fit_goes_on_with_what_a_killed_replacement_leaves(killed: Killed, read: Read) -> None:
    assert read.answers[0]["killed"] < 1e-5
    assert sorted(os.listdir(killed.path.parent)) == ["last.ckpt", "plain.ckpt"]


def test_evaluation_alone_takes_either_kind(read: Read) -> None:
    first, second = (answers["evaluated"] for answers in read.answers)
    assert first["fsdp full"] == pytest.approx(first["ddp full"], abs=1e-5)
    assert first["fsdp parts"] == first["fsdp full"] == second["fsdp full"]


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_model_checkpoint_keeps_the_best(kind: str, read: Read) -> None:
    first, second = (answers["best"][kind] for answers in read.answers)
    assert first[:2] == second[:2]
    assert first[0] == pytest.approx(first[1], abs=1e-6)
    assert len(first[2]) == 2 and "last.ckpt" in first[2], "the best before it is gone"


def test_what_cannot_be_read_or_written_is_refused_on_all_ranks_alike(read: Read) -> None:
    first, second = (answers["refused"] for answers in read.answers)
    assert first == second
    for name, expected in {
        "seen by one rank": "parts.ckpt is a folder of parts on some ranks, but not on rank 1: expected one checkpoint",
        "an address": "memory://bucket/last.ckpt and state_dict='sharded': expected a folder on a disk",
        "an address by default": "ModelCheckpoint with dirpath=memory://bucket",
        "fewer, parts": "loaded state dict contains a parameter group that doesn't match the size of",
        "fewer, full": "loaded state dict contains a parameter group that doesn't match the size of",
        "grouped, parts": "loaded state dict has a different number of parameter groups",
        "grouped, full": "loaded state dict has a different number of parameter groups",
        "no space on one rank": "parts.ckpt.writing cannot be written by rank 1: ",
        "a damaged part": "__1_0.distcp.ckpt cannot be read by rank 1: ",
        "a damaged rest": "lightning.pt.ckpt/lightning.pt cannot be read: ",
        "a damaged table": ".metadata.ckpt cannot be read by rank 0: ",
        "what was there": "nothing",
    }.items():
        assert expected in first[name], (name, first[name])
