"""A user's program on a machine that has neither mpirun nor mpi4py, as far as the strategy can see."""

import importlib.util

import lightning
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_lockstep.strategies import mpi

_find_spec = importlib.util.find_spec
mpi.find_mpirun = lambda settings: None
mpi.importlib.util.find_spec = lambda name, *more: None if name == "mpi4py" else _find_spec(name, *more)

if __name__ == "__main__":
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="lockstep_mpi",
        max_steps=2,
        enable_model_summary=False,
        **quiet,
    )
    trainer.fit(BoringModel())
    trainer.validate(BoringModel())
