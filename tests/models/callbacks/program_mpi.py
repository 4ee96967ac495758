"""Fits with several callbacks on two ranks of an MPI job; each rank writes down what it has found."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_lockstep import AutoBatchSize, LockstepMPIStrategy
from tests.models.batch_size.models import Mid, Walled, largest, trainer
from tests.models.replicas import fits as replicas
from tests.models.stragglers import fits as stragglers
from tests.ranks.overflow.test_communicating_step import outcomes


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


def main() -> None:
    """Fit on the ranks that mpirun has started."""
    folder = sys.argv[1]
    cases = {
        "healthy": replicas.Case(options={"audit_every_n_steps": 4}),
        "skipped": replicas.Case(fault="skipped step"),
        "device": replicas.Case(fault="device", options={"audit_every_n_steps": 4}),
    }
    found = {
        "replicas": {
            name: replicas.fit(case, plain_strategy=strategy(), devices="auto")
            for name, case in cases.items()
        },
        "stragglers": stragglers.fit(1, "data", strategy=strategy(), devices="auto"),
        "batch size": batch_size(folder),
        "overflow": outcomes(["in place"], folder, strategy)["in place"],
        "backend": torch.distributed.get_backend(),
    }
    Path(folder, f"{os.environ['OMPI_COMM_WORLD_RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
