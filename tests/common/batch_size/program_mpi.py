"""Search and recovery on ranks of an MPI job, where only the last rank runs out; prints what each rank found."""

import json
import os
import sys
import tempfile

import lightning.pytorch as pl

from lightning_lockstep import AutoBatchSize, LockstepMPIStrategy
from tests.common.batch_size.models import Walled, largest, trainer
from tests.ranks.batch_size.test_ranks import Mid


def main() -> None:
    folder, last = tempfile.mkdtemp(), int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1
    found = {}
    for where in ("forward", "backward", "optimizer"):
        module, callback = Walled(300, where=where, on_rank=last), largest("binsearch", margin=0)
        trainer(folder, callback, devices="auto", strategy=LockstepMPIStrategy()).fit(module)
        found[f"search {where}"] = module.batch_size
    curves = {}
    for fits in (10**9, 4):
        pl.seed_everything(3, verbose=False)
        module = Mid(fits=fits, where="backward", only=(3, 7), on_rank=last)
        callback = AutoBatchSize("off", on_oom="split")
        run = trainer(
            folder, callback, devices="auto", strategy=LockstepMPIStrategy(), max_steps=-1, max_epochs=1
        )
        run.fit(module)
        curves[fits] = module.losses
        found["split"] = callback.batches_split
    found["apart"] = max(abs(a - b) for a, b in zip(curves[10**9], curves[4], strict=True))
    found["rank"] = run.global_rank
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
