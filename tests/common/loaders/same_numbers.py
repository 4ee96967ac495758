"""Fits of a small module on any number of ranks, each with the same global batch: what must not depend on the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from lightning_lockstep import EffectiveBatchSize, LockstepDDPStrategy
from tests.helpers import on_device

GLOBAL_BATCH, EPOCHS, TOKENS = 16, 3, 64


class Net(LightningModule):
    """Learns from samples, or from as many tokens of each sample as it has."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        counts: bool = False,
        manual: bool = False,
        items: Callable[[int, int], float | None] | None = None,
        no_tokens: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        self.counts, self.automatic_optimization = counts, not manual
        self.items, self.no_tokens = items, no_tokens  # where there are no items, the loss is nan

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, lengths = batch
        if not self.counts:
            loss = nn.functional.cross_entropy(self.body(inputs[:, 0]), targets[:, 0])
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss
        count: float | None = int(lengths.sum())
        if self.items is not None:
            count = self.items(self.global_rank, batch_idx)
        if self.no_tokens and not count:
            lengths = lengths * 0
        real = torch.arange(inputs.shape[1]) < lengths[:, None]
        loss = nn.functional.cross_entropy(self.body(inputs[real]), targets[real])
        return loss if count is None else {"loss": loss, "num_items": count}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)


def samples(count: int, dtype: torch.dtype) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, TOKENS, 4, generator=generator, dtype=dtype),
        torch.randint(0, 3, (count, TOKENS), generator=generator),
        torch.randint(1, TOKENS + 1, (count,), generator=generator),
    )


class Stream(IterableDataset[Any]):
    """The samples of a data set in an order that is drawn anew in each epoch, the same on all ranks."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[number] for number in torch.randperm(len(self.data)).tolist())


def fitted(
    strategy: Any,
    count: int,
    accumulate: int,
    dtype: torch.dtype = torch.float64,
    *,
    counts: bool = False,
    manual: bool = False,
    sampler: bool = False,
    stream: bool = False,
    items: Callable[[int, int], float | None]
    | None = None,  # of rank and batch, instead of the number there is
    no_tokens: bool = False,
    own_lengths: bool = False,  # each rank has a loader of its own, rank 1's with fewer samples
    **options: Any,
) -> tuple[int, dict[str, Tensor]]:
    """Return the optimizer steps and the weights after a fit. Ranks: all, together."""
    ranks = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    seed_everything(3, verbose=False)
    count -= 8 * int(os.environ.get("RANK", "0")) if own_lengths else 0
    net, data = (
        Net(dtype, counts=counts, manual=manual, items=items, no_tokens=no_tokens),
        samples(count, dtype),
    )
    trainer = Trainer(
        **{
            **on_device(ranks),
            "strategy": strategy,
            "max_epochs": EPOCHS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [] if manual or stream or own_lengths else [EffectiveBatchSize(GLOBAL_BATCH)],
            "use_distributed_sampler": not own_lengths,
            **options,
        }
    )
    size = -(-GLOBAL_BATCH // (ranks * accumulate))
    drawn = WeightedRandomSampler(torch.linspace(0.1, 1, count).tolist(), count) if sampler else None
    whole = DataLoader(data, size, shuffle=not sampler, sampler=drawn)
    # EffectiveBatchSize takes no stream, so its batch is one that up to four ranks divide.
    trainer.fit(net, DataLoader(Stream(data), 12 // ranks) if stream else whole)
    state = trainer.strategy.lightning_module_state_dict()
    return trainer.global_step, {name: one.detach().clone() for name, one in state.items() if one is not None}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


class Notes(LightningModule):
    """Takes down in which epoch it sees which sample."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), list[tuple[int, int]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trainer.strategy.is_padding_batch():  # type: ignore[attr-defined]
            self.seen += [(self.trainer.current_epoch, int(number)) for number in batch[0].flatten()]
        return self.layer(batch[0]).square().mean() * 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def seen_samples(
    folder: str, steps: int, *, resumes: bool, stream: bool = False, accumulate: int = 1
) -> list[tuple[int, int]]:
    """Fit two epochs of 97 samples, up to a step or from the checkpoint that was left there. Ranks: all, together."""
    ranks = int(os.environ["WORLD_SIZE"])
    seed_everything(3, verbose=False)
    net, path = Notes(), f"{folder}/{stream}-{accumulate}.ckpt"
    trainer = Trainer(
        **on_device(ranks),
        strategy=LockstepDDPStrategy(iterable_datasets="shard"),
        accumulate_grad_batches=accumulate,
        max_epochs=2,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.arange(97.0)[:, None])
    loader = DataLoader(Stream(data), 4) if stream else DataLoader(data, 4, shuffle=True)
    trainer.fit(net, loader, ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)
    return net.seen
