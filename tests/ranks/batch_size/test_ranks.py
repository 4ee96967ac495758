"""AutoBatchSize on several ranks: the search and the recovery in mid-run."""

from __future__ import annotations

import gc
import re
import resource
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep.batch_size.memory import release_memory
from lightning_lockstep.errors import BatchSizeError, RankFailedError
from tests.common.batch_size.models import FULL, Walled, largest, trainer
from tests.common.batch_size.same_run import strategy_for
from tests.helpers import chosen_device, leave_memory, run_ranks, world_size


def searches(ranks: int, folder: str) -> list[Any]:
    """One process group, many searches: what runs out on the last rank only."""
    found = []
    for where in ("forward", "backward", "optimizer", "collate"):
        module = Walled(300, where=where, on_rank=ranks - 1)
        callback = largest("binsearch", margin=0)
        trainer(folder, callback, devices=ranks, strategy=strategy_for(ranks)).fit(module)
        found.append((module.batch_size, callback.result.largest, module.sizes))
    for settings, module in (
        ({"init_val": 64}, Mid(fits=0, on_rank=ranks - 1)),
        ({"batch_arg_name": "micro"}, Walled()),
        ({"init_val": 1}, Walled()),
    ):
        try:
            trainer(folder, largest(**settings), devices=ranks, strategy=strategy_for(ranks)).fit(module)
        except BatchSizeError as error:  # noqa: PERF203
            found.append(str(error))
    return found


@world_size(2, 4)
def test_all_ranks_find_the_same_size_whoever_runs_out_and_wherever(world_size, tmp_path):
    answers = run_ranks(world_size, searches, world_size, str(tmp_path), backend=None, timeout=170)
    for answer in answers:
        for size, fitted, sizes in answer[:4]:
            assert 294 <= size <= 300 and fitted == size and sizes == [size] * 2
    errors = [answer[4:] for answer in answers]
    assert all(len(each) == 3 for each in errors)
    assert all(each[1:] == errors[0][1:] for each in errors)
    assert all("1 does not fit" in each[0] and "batch norm" in each[2] for each in errors)


class Gathering(Walled):
    """Gathers rows in its step; ``how``. On the last rank memory runs out before it comes to that."""

    def __init__(self, wall: int, how: str, on_rank: int) -> None:
        super().__init__(wall, on_rank=on_rank)
        self.how = how

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        if self.how == "lightning":
            return self.all_gather(rows, sync_grads=True).flatten(0, 1)
        if self.how == "message":
            other = 1 - self.global_rank
            dist.send(rows.detach(), other) if other else dist.recv(torch.empty_like(rows), other)
        whole = rows.new_empty(2 * len(rows), rows.shape[1])
        dist.all_gather_into_tensor(whole, rows.detach())
        return whole

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        if self.full(len(inputs)):
            raise RuntimeError(FULL)
        rows = self.middle(self.first(inputs))
        self.log("loss", rows.mean())
        return (rows @ self.gathered(rows).T).square().mean() + 0 * self.last(rows).mean()


def searches_that_gather(folder: str) -> list[Any]:
    found: list[Any] = []
    for how in ("lightning", "in place", "message"):
        module, callback = Gathering(300, how, on_rank=1), largest("binsearch", margin=0)
        module.norm = nn.Identity()
        try:
            trainer(folder, callback, devices=2, strategy=strategy_for(2)).fit(module)
            found.append((module.batch_size, module.sizes))
        except BatchSizeError as error:
            found.append(str(error))
    return found


def test_a_step_that_gathers_is_tried_on_each_rank_alone(tmp_path):
    both = run_ranks(2, searches_that_gather, str(tmp_path), backend=None, timeout=120)
    for *sizes, refused in both:
        for size, run in sizes:
            assert 294 <= size <= 300 and run == [size] * 2
        assert re.search("(send|recv) cannot be answered in a step that runs on one rank alone", refused)
        assert "Give the batch size yourself" in refused


class Big(pl.LightningModule):
    """About 0.5 MB of activations per sample, with little to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.layers = nn.Sequential(nn.Linear(8, 16000), nn.ReLU(), nn.Linear(16000, 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.layers[1](self.layers[0](batch[0]))
        return self.layers[2](hidden.square().abs()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(16000, 8)), batch_size=self.batch_size)


class RunPeak(pl.Callback):
    """Peak of the memory in use in the run after the search, resident or of the card [bytes]."""

    peak = 0

    def on_train_start(self, run: Any, module: Any) -> None:
        if chosen_device() == "cuda":
            torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")

    def on_train_end(self, run: Any, module: Any) -> None:
        if chosen_device() == "cuda":
            self.peak = torch.cuda.max_memory_allocated()
            return
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        self.peak = int(found.group(1)) * 1024


def real_wall(ranks: int, folder: str, kind: str) -> tuple[int, int, str, float]:
    address_space, resident = (int(n) * 4096 for n in Path("/proc/self/statm").read_text().split()[:2])
    limit = 330 * 2**20 + (resident if chosen_device() == "cpu" else 0)
    if kind == "full" and chosen_device() == "cuda":
        leave_memory(limit)
        callback = largest("model")
    elif kind == "full":
        resource.setrlimit(resource.RLIMIT_AS, (address_space + 500 * 2**20, -1))
        callback = largest("model")
    else:
        callback = largest("model", memory_limit=limit)
    module, peak = Big(), RunPeak()
    trainer(folder, callback, peak, devices=ranks, strategy=strategy_for(ranks), max_steps=4).fit(module)
    assert callback.result is not None
    return module.batch_size, len(callback.result.trials), callback.result.limit_source, peak.peak / limit


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(1, "memory_limit"), (2, "memory_limit"), (4, "memory_limit"), (1, "full")],
)
def test_a_real_limit_is_found_and_kept_to_afterwards(tmp_path, ranks, kind, device):
    answers = run_ranks(ranks, real_wall, ranks, str(tmp_path), kind, backend=None, timeout=170)
    assert len({answer[:3] for answer in answers}) == 1, "the ranks do not agree"
    size, trials, source, _ = answers[0]
    full = {"cpu": "RLIMIT_AS", "cuda": "free memory of cuda:0"}[device]
    assert source == (full if kind == "full" else kind) and trials <= 14 and size > 300
    if kind == "memory_limit":
        # A heap that keeps what is freed ends anywhere between 320 and 740; here only what is alive counts.
        assert 600 < size < 1000
        assert max(answer[3] for answer in answers) < 1.05


class Mid(Walled):
    """Each micro-batch of more than ``fits`` samples runs out of memory in the batches of ``only``."""

    def __init__(self, *, fits: int, use_norm: bool = False, **kwargs: Any) -> None:
        super().__init__(fits, rows=16 * 24, batch_size=16, **kwargs)
        if not use_norm:
            self.norm = nn.Identity()


def fit_mid(
    ranks: int, folder: str, *, on_oom: str = "split", strategy: Any = None, accumulate: int = 1, **kw: Any
):
    from lightning_lockstep import AutoBatchSize

    warnings.simplefilter("ignore")
    pl.seed_everything(3)
    module = Mid(**kw)
    callback = AutoBatchSize("off", on_oom=on_oom)
    run = trainer(
        folder,
        callback,
        devices=ranks,
        strategy=strategy or strategy_for(ranks),
        max_steps=-1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    run.fit(module)
    weights = torch.cat([t.detach().flatten().float() for t in module.state_dict().values()])
    epoch_loss = float(run.callback_metrics["loss_epoch"])
    return weights, module.losses, callback.batches_split, epoch_loss, len(module.losses)


def recoveries(ranks: int, folder: str) -> dict[str, Any]:
    last = ranks - 1
    told: dict[str, Any] = {}
    views = (
        [None]
        if ranks == 1
        else [None, strategy_for(ranks, gradient_as_bucket_view=False, bucket_cap_mb=0.003)]
    )
    for accumulate, strategy in [(1, views[0]), (2, views[-1])]:
        shared = {"accumulate": accumulate, "on_rank": last}
        room = fit_mid(ranks, folder, fits=10**9, **shared)
        for where in ("forward", "backward"):
            options = {"fits": 4, "where": where, "only": (0, 3, 7), "strategy": strategy, **shared}
            if ranks > 1 and strategy is not None:
                options["strategy"] = strategy_for(ranks, gradient_as_bucket_view=False, bucket_cap_mb=0.003)
            got = fit_mid(ranks, folder, **options)
            told[f"split {where} {accumulate}"] = (
                float((got[0] - room[0]).abs().max()),
                max(abs(a - b) for a, b in zip(got[1], room[1], strict=True)),
                got[2],
                abs(got[3] - room[3]),
            )
    for where in ("forward", "backward"):
        got = fit_mid(ranks, folder, fits=4, where=where, only=(3, 7), on_rank=last, on_oom="skip")
        told[f"skip {where}"] = (float(got[0].sum()), got[2], got[4])
    kept = fit_mid(ranks, folder, fits=4, where="backward", only=(3,), on_rank=last, use_norm=True)
    told["norm"] = (kept[2], float(kept[0].sum()))
    for where in ("forward", "backward"):
        try:
            fit_mid(ranks, folder, fits=0, where=where, only=(3,), on_rank=last)
        except BatchSizeError as error:  # noqa: PERF203
            told[f"hopeless {where}"] = str(error)
    return told


@world_size(1, 2)
def test_a_batch_that_does_not_fit_in_mid_run(world_size, tmp_path):
    answers = run_ranks(world_size, recoveries, world_size, str(tmp_path), backend=None, timeout=200)
    last = world_size - 1
    for told in answers:
        for name in ("split forward 1", "split backward 1", "split forward 2", "split backward 2"):
            weights, losses, count, epoch_loss = told[name]
            assert weights < 1e-5 and losses < 1e-5 and epoch_loss < 1e-5 and count >= 3, name
        for where in ("forward", "backward"):
            assert told[f"skip {where}"][1:] == (2, 24 // world_size)
            assert told[f"skip {where}"] == answers[0][f"skip {where}"], "ranks drifted apart"
            text = told[f"hopeless {where}"]
            assert (
                f"rank {last} ran out of memory in batch 3 of epoch 0, and single samples do not fit" in text
            )
            assert text == answers[0][f"hopeless {where}"]
        assert told["norm"][0] == 1


def skips_after_an_error(folder: str) -> tuple[str, float, int]:
    from lightning_lockstep.batch_size.recovery import Recovery
    from lightning_lockstep.distributed import current_communicator

    said = ""
    try:
        fit_mid(3, folder, fits=0, where="forward", only=(3,), on_rank=0)
    except BatchSizeError as error:
        said = str(error)
    before = Recovery._receive

    def slow(self: Any, message: Any) -> None:
        time.sleep(0.5)
        before(self, message)

    if current_communicator().rank == 2:  # the last to hear of it
        Recovery._receive = slow  # type: ignore[method-assign]
    got = fit_mid(3, folder, fits=4, where="forward", only=(3,), on_rank=0, on_oom="skip")
    return said, float(got[0].sum()), got[2]


def test_a_fit_that_ended_in_an_error_does_not_acknowledge_for_the_others_of_the_next(tmp_path):
    answers = run_ranks(3, skips_after_an_error, str(tmp_path), backend=None, timeout=100)
    assert "single samples do not fit" in answers[0][0]
    assert answers == [answers[0]] * 3, "ranks drifted apart"
    assert answers[0][2] == 1


class Told(Walled):
    """Hears in its step that another rank has failed."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise RankFailedError(f"rank 1 failed: RuntimeError: {FULL}")
        return super().training_step(batch, batch_idx)


def test_what_ran_out_on_another_rank_is_not_recovered_from_here(tmp_path):
    from lightning_lockstep import AutoBatchSize

    callback = AutoBatchSize("off", on_oom="split")
    module = Told()
    held = weakref.ref(module)
    with pytest.raises(RankFailedError):
        trainer(tmp_path, callback).fit(module)
    assert callback.batches_split == 0
    del module, callback
    gc.collect()
    assert held() is None, "its memory would be missing in the next fit"


class Thawed(Walled):
    """Trains its last layer from the start of training on, which is after the start of the fit."""

    def setup(self, stage: str) -> None:
        self.last.requires_grad_(False)

    def on_train_start(self) -> None:
        self.last.requires_grad_(True)


def test_what_is_trained_is_known_in_the_midst_of_a_resumed_epoch_too(tmp_path):
    from lightning_lockstep import AutoBatchSize

    saved = str(tmp_path / "middle.ckpt")
    first = trainer(tmp_path, max_steps=2)
    first.fit(Thawed())
    first.save_checkpoint(saved)
    module = Thawed(2, only=(2,))
    seen = []
    module.last.weight.register_hook(lambda gradient: seen.append(module.trainer.global_step))
    callback = AutoBatchSize("off", on_oom="split")
    trainer(tmp_path, callback, max_steps=4).fit(module, ckpt_path=saved)
    assert callback.batches_split == 1
    assert sorted(set(seen)) == [2, 3]


class Growing(pl.LightningModule):
    """Sequences grow by the step; more than ``wall`` values at once run out of memory."""

    def __init__(self, wall: int) -> None:
        super().__init__()
        self.layer, self.wall, self.largest = nn.Linear(4, 4), wall, 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch.numel() > self.wall:
            raise MemoryError
        self.largest = max(self.largest, batch.numel())
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def grow() -> tuple[int, int, int]:
    from lightning_lockstep import AutoBatchSize

    data = [torch.randn(1 + index // 8, 4) for index in range(8 * 30)]
    loader = DataLoader(data, batch_size=8)
    module, callback = Growing(400), AutoBatchSize("off", on_oom="split")
    run = trainer("/tmp", callback, max_steps=-1, max_epochs=1)
    run.fit(module, loader)
    return run.global_step, callback.batches_split, module.largest


def test_a_run_whose_sequences_grow_survives():
    ((steps, recovered, largest),) = run_ranks(1, grow, backend=None, timeout=60)
    assert steps == 30 and recovered == 18 and largest <= 400


class Limited(pl.Callback):
    """Lets one rank have almost no more memory during one batch: a real allocation fails."""

    def __init__(self, batch: int | None, rank: int) -> None:
        self.batch, self.rank, self.before = batch, rank, (0, 0)

    def on_train_batch_start(self, run: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and run.global_rank == self.rank:
            release_memory()
            if chosen_device() == "cuda":
                leave_memory(24 * 2**20)
                return
            data = int(Path("/proc/self/statm").read_text().split()[5]) * 4096
            self.before = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (data + 24 * 2**20, self.before[1]))

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and run.global_rank == self.rank:
            if chosen_device() == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0)
                return
            resource.setrlimit(resource.RLIMIT_DATA, self.before)


class Regression(Big):
    """Learns a sine; a batch of 256 keeps 32 MB of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16000), nn.GELU(), nn.Linear(16000, 1))
        self.batch_size, self.losses = 256, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = (self.layers(batch[0])[:, 0] - batch[0].sum(1).sin()).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(256 * 80, 8, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(data), batch_size=self.batch_size)


def curves_with_and_without_room(ranks: int, folder: str) -> list[Any]:
    from lightning_lockstep import AutoBatchSize
    from lightning_lockstep.batch_size.memory import return_freed_memory

    return_freed_memory()
    told: list[Any] = []
    for batch in (None, 20):
        pl.seed_everything(4)
        module, callback = Regression(), AutoBatchSize("off", on_oom="split")
        limited = Limited(batch, ranks - 1)
        trainer(
            folder, callback, limited, devices=ranks, strategy=strategy_for(ranks), max_epochs=1, max_steps=40
        ).fit(module)
        told.append((module.losses, callback.batches_split))
    return told


@world_size(1, 2)
def test_batch_20_really_does_not_fit_and_the_curve_is_that_of_a_run_with_room(world_size, tmp_path, device):
    answers = run_ranks(
        world_size, curves_with_and_without_room, world_size, str(tmp_path), backend=None, timeout=170
    )
    assert sum(count for _, (_, count) in answers) >= 1
    for (room, none), (tight, _) in answers:
        assert none == 0 and len(room) == len(tight) == 40 and room[-1] < room[0]
        assert max(abs(a - b) for a, b in zip(room, tight, strict=True)) < 1e-5
        assert room[:20] == tight[:20]
