"""Ranks as Ray Train has them: connected before the Trainer is made, and trained in a thread."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import LaunchError, LockstepDDPStrategy, LockstepMPIStrategy
from lightning_lockstep._lightning import LightningModule, Trainer
from tests.harness import run_ranks_raw
from tests.models.strategies.fsdp_models import QUIET as QUIETLY

QUIET = {**QUIETLY, "max_epochs": 1}


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise ValueError("this batch cannot be used")
        return self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def refused() -> list[str]:
    """What is said to a Trainer of more ranks than are connected, of one, and of one that wants MPI."""
    told = []
    for devices, strategy in (
        (4, LockstepDDPStrategy()),
        (1, LockstepDDPStrategy()),
        (2, LockstepMPIStrategy()),
    ):
        with pytest.raises(LaunchError) as caught:
            trainer = Trainer(devices=devices, strategy=strategy, **QUIET)
            trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(8, 2)), 1))
        told.append(str(caught.value))
    return told


def test_a_fit_on_other_ranks_than_are_connected_is_refused_on_each() -> None:
    for outcome in run_ranks_raw(2, refused):
        more, one, mpi = outcome.value
        assert "devices=4 and num_nodes=1 ask for 4 ranks, but an earlier Trainer" in more
        assert "has connected 2 ranks. Set devices to the number of ranks on each node" in more
        assert "devices=1 and num_nodes=1 ask for 1 rank, but" in one
        assert "The ranks of LockstepMPIStrategy were not started by MPI" in mpi


def fails_in_a_thread() -> list[str]:
    caught: list[BaseException] = []

    def train() -> None:
        trainer = Trainer(devices=2, strategy=LockstepDDPStrategy(), **QUIET)
        try:
            trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(8, 2)), 1))
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    return [type(caught[0]).__name__, *getattr(caught[0], "__notes__", [])]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_the_error_of_a_thread_says_which_rank_it_is_of() -> None:
    # Rank 0 learns of it while it waits in a collective, and its process ends with exit code 1.
    kind, note = run_ranks_raw(2, fails_in_a_thread)[1].value
    assert kind == "ValueError"
    assert note.startswith("\nrank 1 of 2 (host ")
    headline, saved = note.rsplit("\n", 1)
    assert headline.endswith(
        "failed at epoch 0, step 1, batch 1, stage train, in training_step: ValueError: this batch cannot be used"
    )
    assert saved.startswith("Saved to ")
