"""Callbacks under mpirun, where ranks talk over mpi4py: one job runs the fits of all of them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_lockstep import AutoBatchSize, LockstepMPIStrategy
from tests.models.batch_size.models import Mid, Walled, largest, trainer
from tests.models.distributed.mpi.launch import run_mpi
from tests.models.replicas import fits as replicas
from tests.models.stragglers import fits as stragglers
from tests.ranks.overflow.test_communicating_step import check_contrastive, outcomes

pytestmark = pytest.mark.mpi


def strategy() -> LockstepMPIStrategy:
    return LockstepMPIStrategy(backend="auto")


def batch_size(folder: str) -> dict[str, Any]:
    """A search in which only rank 1 runs out, and the curves of runs with and without room."""
    found: dict[str, Any] = {}
    for where in ("forward", "backward", "optimizer"):
        module, callback = Walled(300, where=where, on_rank=1), largest(margin=0)
        trainer(folder, callback, devices="auto", strategy=strategy()).fit(module)
        found[f"search {where}"] = module.batch_size
    curves = []
    for fits in (10**9, 4):
        pl.seed_everything(3, verbose=False)
        module, callback = (
            Mid(fits=fits, where="backward", only=(3, 7), on_rank=1),
            AutoBatchSize("off", on_oom="split"),
        )
        epoch = {"max_steps": -1, "max_epochs": 1}
        trainer(folder, callback, devices="auto", strategy=strategy(), **epoch).fit(module)
        curves.append(module.losses)
    apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
    return {**found, "split": callback.batches_split, "apart": apart}


def fits(folder: str) -> dict[str, Any]:
    cases = {
        "healthy": replicas.Case(options={"audit_every_n_steps": 4}),
        "skipped": replicas.Case(fault="skipped step"),
        "device": replicas.Case(fault="device", options={"audit_every_n_steps": 4}),
    }
    return {
        "replicas": {
            name: replicas.fit(case, plain_strategy=strategy(), devices="auto") for name, case in cases.items()
        },
        "stragglers": stragglers.fit(1, "data", strategy=strategy(), devices="auto"),
        "batch size": batch_size(folder),
        "overflow": outcomes(["in place"], folder, strategy)["in place"],
        "backend": torch.distributed.get_backend(),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run_mpi(2, fits, str(tmp_path_factory.mktemp("mpi")))
    assert [each["backend"] for each in found] == ["mpi4py", "mpi4py"]
    return found


def test_the_batch_size(both: list[dict[str, Any]]) -> None:
    zero, one = (each["batch size"] for each in both)
    assert zero == one or abs(zero["apart"] - one["apart"]) < 1e-5
    for each in (zero, one):
        assert all(294 <= each[f"search {where}"] <= 300 for where in ("forward", "backward", "optimizer"))
        assert each["split"] >= 2 and each["apart"] < 1e-5


def test_the_overflow(both: list[dict[str, Any]]) -> None:
    check_contrastive(*(each["overflow"] for each in both))


def test_the_replicas(both: list[dict[str, Any]]) -> None:
    found = both[0]["replicas"]
    assert found["healthy"] == {"error": None, "lines": [], "steps": 12}
    assert "An optimizer has stepped on some ranks only" in found["skipped"]["error"]
    assert found["device"]["error"].startswith("rank 0, rank 1 compute different values")


def test_the_straggler(both: list[dict[str, Any]]) -> None:
    found = both[0]["stragglers"]
    verdict = found["verdict"]
    assert (verdict["rank"], verdict["where"]) == (1, "data loading"), found["text"]
