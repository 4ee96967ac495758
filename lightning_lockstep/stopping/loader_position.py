"""A resumed epoch continues with the next batch of data.

Lightning's checkpoints count the batches of an epoch, and a resumed run counts on from there, but an ordinary
DataLoader starts its epoch again: batches are seen twice and the last ones never. Here the batches that were
seen are skipped where they are chosen, in the batch sampler, so that none is loaded only to be thrown away. The
order of an epoch that was drawn from a random state is drawn from the same state again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.random import fork_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_lockstep._doors.lightning import CombinedLoader
from lightning_lockstep._doors.lightning_internals import restart_training_iterators


class LoaderPosition:
    """Saves where the training loaders of one rank are, and continues there."""

    def __init__(self, world_size: int) -> None:
        # With several, Lightning's own samplers repeat the order of an epoch from their seed.
        self._one_rank = world_size == 1
        self._saved: list[Any] = []
        self._random: Any = None

    def watch(self, fit_loop: Any) -> None:
        """Begin to watch loaders that are not watched yet."""
        for loader in _plain_loaders(fit_loop):
            if not isinstance(loader.batch_sampler, _ResumableBatches):
                # DataLoader refuses this by its own __setattr__, since it could not check what it gets.
                object.__setattr__(loader, "batch_sampler", _ResumableBatches(loader.batch_sampler))

    def state(self, fit_loop: Any) -> dict[str, Any]:
        """Return the random states: now, and where the loaders drew the order of this epoch from."""
        if not self._one_rank:
            return {}
        drawn_from = [
            watched.drawn_from
            for loader in _plain_loaders(fit_loop)
            if isinstance(watched := loader.batch_sampler, _ResumableBatches)
        ]
        return {"drawn_from": drawn_from, "now": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Take what :meth:`state` returned before."""
        self._saved, self._random = list(state.get("drawn_from", [])), state.get("now")

    def resume(self, fit_loop: Any) -> None:  # before its first epoch of this run
        """Start the epoch's iterators again, behind the batches that were seen before the checkpoint."""
        batches = _batches_seen(fit_loop)
        if batches == 0 and not _has_workers(fit_loop):
            self._saved = []
            return  # the iterators have not drawn anything yet
        loaders = _plain_loaders(fit_loop)
        saved = self._saved if len(self._saved) == len(loaders) else [None] * len(loaders)
        for loader, drawn_from in zip(loaders, saved, strict=True):
            loader.batch_sampler.begin_at(batches, drawn_from if batches else None)
            _set_epoch(loader, fit_loop.epoch_progress.current.processed)
        with fork_rng(devices=[]):
            _discard(fit_loop, restart_training_iterators(fit_loop), batches)
        self._saved = []
        if batches:
            if self._one_rank and self._random is not None:
                torch.set_rng_state(self._random)
            # Lightning takes every loader that saves no state for one that starts from the beginning.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")


class _ResumableBatches:
    """A batch sampler that can begin later in its epoch and keeps the state its order was drawn from."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._skip = 0
        self._draw_from: list[Any] | None = None
        self.drawn_from: list[Any] = []

    def begin_at(self, batch: int, drawn_from: list[Any] | None) -> None:
        """Begin the next epoch at ``batch``, in the order drawn from a state that was saved, if any."""
        self._skip, self._draw_from = batch, drawn_from

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        draw_from, self._draw_from = self._draw_from, None
        generator = getattr(getattr(self._inner, "sampler", None), "generator", None)
        if draw_from:
            batches, first = self._repeat_order(draw_from, generator)
        else:
            own = generator.get_state() if generator is not None else None
            self.drawn_from = [torch.get_rng_state(), own]
            batches = iter(self._inner)
            first = next(batches, None)
        if first is None:
            return
        if skip == 0:
            yield first
        for number, batch in enumerate(batches, 1):
            if number >= skip:
                yield batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # not there yet while a worker unpickles it
            raise AttributeError(name)
        return getattr(self._inner, name)

    def _repeat_order(self, draw_from: list[Any], generator: Any) -> tuple[Iterator[Any], Any]:
        self.drawn_from = draw_from
        state, own = draw_from
        if generator is not None and own is not None:
            generator.set_state(own)
        with fork_rng(devices=[]):
            torch.set_rng_state(state)
            batches = iter(self._inner)
            return batches, next(batches, None)


def _batches_seen(fit_loop: Any) -> int:
    """Return how many batches of the epoch that begins here were seen before the checkpoint; 0 without one."""
    if not fit_loop.restarting:
        return 0
    seen = int(fit_loop.epoch_loop.batch_progress.current.ready)
    return seen if seen < fit_loop.trainer.num_training_batches else 0


def _loaders(fit_loop: Any) -> list[Any]:
    loaders = fit_loop.trainer.train_dataloader
    return [] if loaders is None else list(CombinedLoader(loaders).flattened)


def _plain_loaders(fit_loop: Any) -> list[Any]:
    """Return the loaders that Lightning cannot resume by itself and whose batches a sampler chooses."""
    return [loader for loader in _loaders(fit_loop) if _chooses_batches(loader)]


def _chooses_batches(loader: Any) -> bool:
    return (
        type(loader).__iter__ is DataLoader.__iter__
        and not _saves_its_state(loader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _saves_its_state(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _has_workers(fit_loop: Any) -> bool:
    return any(getattr(loader, "num_workers", 0) for loader in _plain_loaders(fit_loop))


def _set_epoch(loader: Any, epoch: int) -> None:
    # Workers ask for their first batches as soon as the iterator is made, before Lightning sets the epoch.
    for sampler in {
        id(s): s for s in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    }.values():
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _discard(fit_loop: Any, iterators: list[Any], batches: int) -> None:
    """Read past the seen batches of loaders without a sampler; their data has to be loaded for that."""
    for loader, iterator in zip(_loaders(fit_loop), iterators, strict=False):
        if not _chooses_batches(loader) and not _saves_its_state(loader):
            for _ in range(batches):
                next(iterator, None)
