"""The callbacks of this package under LockstepFSDPStrategy, in fits on two ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_lockstep import (
    AutoBatchSize,
    ConfigurationError,
    LockstepError,
    OverflowDetectedError,
    OverflowDetector,
    Preempted,
    StaticShapes,
    StopTogether,
    SyncedEarlyStopping,
    set_breakpoint,
)
from lightning_lockstep._lightning import LightningModule, Trainer, seed_everything
from tests.harness import run_ranks
from tests.models.batch_size.models import largest
from tests.models.replicas import fits as replica_fits
from tests.models.static_shapes.nets import Net as Shaped
from tests.models.static_shapes.nets import loader as ragged
from tests.models.stragglers import fits as stragglers
from tests.models.strategies.fsdp_models import QUIET, Block, Net, fsdp, loader


def run(module: LightningModule, data: Any = None, strategy: Any = None, **options: Any) -> Trainer:
    seed_everything(7, verbose=False)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(**{**QUIET, "devices": 2, "max_epochs": 2, **options}, strategy=strategy or fsdp())
    trainer.fit(module, data if data is not None else loader(2), ckpt_path=ckpt_path)
    return trainer


def seeded(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    seed_everything(7, verbose=False)
    return make(*args, **options)


def digest(trainer: Trainer) -> list[float]:
    """Sums of this rank's parts of the weights, which any change of them changes."""
    parameters = list(trainer.lightning_module.parameters())
    with torch.no_grad():
        return [float(p.to_local().double().sum()) if hasattr(p, "to_local") else -1.0 for p in parameters]


# -- OverflowDetector ----------------------------------------------------------------------------------


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: bool) -> Tensor:
        ctx.bad = bad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * float("nan") if ctx.bad else gradient, None


class BadBlock(Block):
    """Goes wrong in some calls, on one rank alone."""

    def __init__(self, how: str, batches: tuple[int, ...]) -> None:
        super().__init__()
        self.how, self.batches = how, batches

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        bad = int(self.calls) - 1 in self.batches and os.environ["RANK"] == "1"  # type: ignore[arg-type]
        return x * float("inf") if bad and self.how == "forward" else _BadBackward.apply(x, bad)  # type: ignore[no-untyped-call]


class Bad(Net):
    def __init__(self, how: str, batches: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks[1] = BadBlock(how, batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


OVERFLOWS: dict[str, dict[str, Any]] = {
    "forward": {},
    "backward": {},
    "backward, accumulated": {"trainer": {"accumulate_grad_batches": 2}, "batches": (2,)},
    "backward, skip": {"detector": {"action": "skip"}, "batches": (1, 3)},
    "forward, 16 bits": {"trainer": {"precision": "16-mixed"}},
    "backward, 16 bits": {"trainer": {"precision": "16-mixed"}, "batches": (1,)},
}


def overflows(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in OVERFLOWS.items():
        detector = OverflowDetector(report_dir=f"{folder}/{name}", **case.get("detector", {}))
        module = Bad(name.split(",")[0], case.get("batches", (3,)))
        error, steps = "", -1
        try:
            trainer = run(
                module,
                strategy=fsdp(),
                callbacks=[detector],
                **case.get("trainer", {}),
            )
            steps = trainer.global_step
        except OverflowDetectedError as caught:
            error = str(caught)
        first = detector.reports[0] if detector.reports else None
        what = None if first is None else first.producer or first.backward_producer
        found[name] = {
            "error": error,
            "steps": steps,
            "module": what and what.module,
            "batch": first and first.occasion.batch_number,
            "notes": first and first.notes,
            "skipped": (detector.skipped_steps, detector.scaler_skips),
            "finite": all(bool(p.to_local().isfinite().all()) for p in module.parameters()),  # type: ignore[attr-defined]
        }
    return found


def test_overflow_detector_names_module_rank_and_batch(tmp_path: Path) -> None:
    zero, one = run_ranks(2, overflows, str(tmp_path), timeout=180)
    for name in OVERFLOWS:
        assert zero[name]["error"] == one[name]["error"], name
        assert zero[name]["finite"] and one[name]["finite"], name
    for name in ("forward", "backward", "backward, accumulated"):
        assert "rank 1 (host" in one[name]["error"], (name, one[name])
        assert one[name]["module"] == "blocks.1", (name, one[name])
        assert one[name]["batch"] == (2 if "accumulated" in name else 3), name
        assert zero[name]["module"] is None and zero[name]["notes"] == one[name]["notes"] == [], name
    for found in (zero, one):
        assert found["backward, skip"]["steps"] == 8 and found["backward, skip"]["skipped"] == (2, 0)
        # No loss scale lets an infinite forward pass; a bad gradient may come of the scale.
        assert "which no loss scale can fix" in found["forward, 16 bits"]["error"]
        assert found["backward, 16 bits"]["skipped"] == (0, 1) and found["backward, 16 bits"]["error"] == ""


# -- AutoBatchSize -------------------------------------------------------------------------------------


def refused_sizes() -> list[str]:
    found = []
    for callback in (largest(), AutoBatchSize("off", on_oom="split")):
        with pytest.raises(LockstepError) as caught:
            run(Net(), callbacks=[callback])
        found.append(str(caught.value))
    return found


def test_auto_batch_size_is_refused_on_all_ranks_before_a_step() -> None:
    first, second = run_ranks(2, refused_sizes)
    assert first == second
    for said in first:
        assert said.startswith("no batch size can be tried with LockstepFSDPStrategy: it divides the model"), said


# -- SyncedEarlyStopping, StopTogether -----------------------------------------------------------------


class Judged(Net):
    def on_train_epoch_end(self) -> None:
        self.log("judged", float(self.current_epoch) if self.global_rank else -1.0)


def stops_early() -> tuple[int, str]:
    stop = SyncedEarlyStopping("judged", patience=1, verbose=False, check_on_train_epoch_end=True)
    trainer = run(Judged(), callbacks=[stop], max_epochs=6)
    return trainer.current_epoch, stop.stopping_reason.name


def test_early_stopping_is_decided_by_all_ranks(found: Found) -> None:
    zero, one = found["early"]
    assert zero == one
    assert zero[0] < 6 and zero[1] == "PATIENCE_EXHAUSTED"


class Leaves(Net):
    """Rank 1 is told to end by its scheduler, or sets a breakpoint."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5 and self.global_rank == 1:
            self.how()
        return super().training_step(batch, batch_idx)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stops_and_resumes(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("full", "sharded"):

        def fit(module: Net, kind: str = kind, **options: Any) -> Trainer:
            return run(module, strategy=fsdp(state_dict=kind), max_epochs=3, **options)

        whole = digest(fit(seeded(Net)))
        left = ""
        try:
            fit(seeded(Leaves, terminated), callbacks=[StopTogether(dirpath=f"{folder}/{kind}")])
        except Preempted as preempted:
            left = str(preempted.checkpoint)
        rest = Net()
        again = fit(rest, ckpt_path=left)
        found[kind] = (digest(again) == whole, again.global_step, Path(left).is_dir(), len(rest.losses))
    broken = run(seeded(Leaves, set_breakpoint), callbacks=[StopTogether()], max_epochs=3)
    path = f"{folder}/by_hand.ckpt"
    broken.save_checkpoint(path)
    rest = Net()
    found["breakpoint"] = (
        digest(run(rest, ckpt_path=path, max_epochs=3)) == whole,
        12,
        False,
        len(rest.losses),
    )
    return found


def test_a_stop_on_one_rank_leaves_a_checkpoint_that_resumes(found: Found) -> None:
    zero, one = found["stops"]
    assert zero == one
    for kind in ("full", "sharded", "breakpoint"):
        same, steps, is_folder, batches = zero[kind]
        assert same and steps == 12 and 0 < batches <= 7, zero
        assert is_folder == (kind == "sharded")


# -- StragglerMonitor, StaticShapes --------------------------------------------------------------------


def is_slow() -> dict[str, Any]:
    return stragglers.fit(1, strategy=fsdp(shard=lambda name, module: isinstance(module, nn.Linear)))


def test_straggler_monitor_names_the_slow_rank(found: Found) -> None:
    verdicts = [each["verdict"] for each in found["slow"]]
    assert verdicts[0]["rank"] == 1, verdicts


def shapes() -> dict[str, Any]:
    rank, found = int(os.environ["RANK"]), {}
    for name, callbacks in (("ragged", []), ("padded", [StaticShapes(batch_size="train")])):
        net = Shaped()  # it seeds itself
        trainer = run(net, ragged((19, 22)[rank], 6, seed=rank), fsdp(shard="auto"), callbacks=callbacks)
        found[name] = digest(trainer)
    return {**found, "sizes": sorted({size for stage, size in net.shapes if stage == "training"})}


def test_static_shapes_give_the_weights_of_ragged_batches(found: Found) -> None:
    for of_rank in found["shapes"]:
        assert of_rank["padded"] == pytest.approx(of_rank["ragged"], abs=1e-6) and len(of_rank["padded"]) == 4
        assert of_rank["sizes"] == [6]


# -- ReplicaCheck --------------------------------------------------------------------------------------


def replicas() -> dict[str, Any]:
    found = {}
    for fault in ("", "buffer"):
        case = replica_fits.Case(fault=fault, steps=7, step=2)
        found[fault] = replica_fits.fit(case, plain_strategy=fsdp(shard="Linear"))["error"]
    try:
        case = replica_fits.Case(steps=7, options={"audit_every_n_steps": 2})
        replica_fits.fit(case, plain_strategy=fsdp(shard="Linear"))
    except ConfigurationError as error:
        found["audit"] = str(error)
    return found


def test_replica_check_compares_what_each_rank_has_whole(found: Found) -> None:
    for of_rank in found["replicas"]:
        assert of_rank[""] is None
        assert "scale" in of_rank["buffer"] or "average" in of_rank["buffer"]
        assert "does not work with LockstepFSDPStrategy" in of_rank["audit"]


# -- One group of ranks for what is quick --

Found = dict[str, tuple[Any, Any]]


def quick(folder: str) -> dict[str, Any]:
    return {
        "early": stops_early(),
        "stops": stops_and_resumes(folder),
        "slow": is_slow(),
        "shapes": shapes(),
        "replicas": replicas(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What came of each, by rank."""
    zero, one = run_ranks(2, quick, str(tmp_path_factory.mktemp("quick")), timeout=240)
    return {name: (zero[name], one[name]) for name in zero}
