"""RankOrderedLogging in a real fit: one console, one file a rank."""

from __future__ import annotations

import json
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_lockstep import ConfigurationError, RankOrderedLogging, get_logger
from lightning_lockstep._lightning import LightningModule, Trainer
from tests.harness import QUIET, run_ranks_raw

log = get_logger("lockstep_test_user", "INFO")
other = logging.getLogger("lockstep_test_library")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            log.info("same", in_order=True, extra={"batch": batch_idx})
            log.info("mine is %d", self.global_rank, in_order=True)
            other.warning("the library warns")
            warnings.warn("python warns", stacklevel=1)
            log.warning("on every console", main_process_only=False)
            if self.global_rank == 1:
                other.error("only on rank 1")
                log.info("rank 0 never logs this", in_order=True)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder: str) -> dict:
    console = logging.StreamHandler()
    logging.getLogger().addHandler(console)
    before = {name: list(logging.getLogger(name).handlers) for name in (None, "lightning.pytorch")}
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        **QUIET,
        default_root_dir=folder,
        callbacks=[RankOrderedLogging(files="json", order_timeout=20.0)],
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2))
    torch.distributed.barrier()
    after = {name: list(logging.getLogger(name).handlers) for name in (None, "lightning.pytorch")}
    return {"given back": before == after, "level": logging.getLogger().level}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def outcomes(folder):
    outcomes = run_ranks_raw(2, fit, str(folder), backend=None, timeout=90)
    assert all(o.ok for o in outcomes), outcomes[0].traceback
    return outcomes


def test_one_console_and_a_file_for_each_rank(folder, outcomes):
    assert all(o.value == {"given back": True, "level": logging.WARNING} for o in outcomes)
    console = outcomes[0].stderr
    assert len(re.findall(r":0-1 lockstep_test_user test_callback\.py:\d+ same\n", console)) == 1
    assert console.index("mine is 0") < console.index("mine is 1")
    # Lightning leaves out the category if the path has "lightning" in it, as that of a clone does.
    assert console.count("the library warns") == 1
    assert len(re.findall(r"\d: (?:UserWarning: )?python warns\n", console)) == 1
    assert console.count("only on rank 1") == 1
    assert all(outcome.stderr.count("on every console") == 1 for outcome in outcomes)
    assert "max_epochs=1" in console, "Lightning's own loggers are included"
    assert ":1 lockstep_test_user" in next(x for x in console.splitlines() if "rank 0 never logs this" in x)
    assert "warns" not in outcomes[1].stderr and "mine" not in outcomes[1].stderr
    for rank in range(2):
        text = Path(folder, "logs", f"rank-{rank}.jsonl").read_text()
        entries = [json.loads(line) for line in text.splitlines()]
        said = [e["message"] for e in entries if e["logger"].startswith("lockstep_test")]
        expected = [
            "same",
            f"mine is {rank}",
            "the library warns",
            "on every console",
            *(["only on rank 1", "rank 0 never logs this"] if rank else []),
        ]
        assert said == expected
        assert next(e for e in entries if e["message"] == "same")["batch"] == 1
        assert {e["rank"] for e in entries} == {rank}


def test_bad_arguments_come_all_at_once():
    with pytest.raises(ConfigurationError) as caught:
        RankOrderedLogging(level="loud", files="csv", order_timeout=0)
    assert len(caught.value.faults) == 3 and "level='loud'" in str(caught.value)
