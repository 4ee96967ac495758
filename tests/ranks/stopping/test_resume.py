"""A resumed epoch goes on with the next batch, sample for sample, whatever the loader and the stop.

The other loaders, and other numbers of ranks, are in ``tests/variants``; stops by ``max_steps`` among the random
programs; those by signals and breakpoints in ``test_fit.py`` and ``tests/variants/strategies/test_fsdp_callbacks.py``.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tests.harness import run_ranks
from tests.models.stopping.resumes import (
    around_epochs,
    batches_by_epoch,
    ended_by_a_callback,
    table,
)

LOADERS = [
    "shuffled",
    "wrapped",
    "workers",
    "own batch sampler",
    "combined, max_size_cycle",
    "a dict with a stream",
    "stateful",
    "stateful data",
    "uneven, join",
    "accumulated",
]


def test_every_loader_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    for found in run_ranks(2, table, str(tmp_path), LOADERS, backend=None, timeout=120):
        assert found == dict.fromkeys(LOADERS, "exact")


def test_the_next_epoch_is_drawn_from_the_same_generator(tmp_path: Path) -> None:
    name = "shuffled by a generator"
    for wrong in run_ranks(2, around_epochs, str(tmp_path), name, backend=None, timeout=120):
        assert wrong == {}


def test_a_limit_of_a_stream_without_a_length_holds_in_each_epoch() -> None:
    options = {"limit_train_batches": 2}
    for found in run_ranks(2, functools.partial(batches_by_epoch, "stream", **options), backend=None):
        assert found == {0: 2, 1: 2, 2: 2}


def test_a_fit_that_a_callback_has_ended_goes_on(tmp_path: Path) -> None:
    for first, resumed, whole in run_ranks(2, ended_by_a_callback, str(tmp_path), backend=None):
        assert len(whole) // 3 < len(first) < len(whole) and first + resumed == whole
