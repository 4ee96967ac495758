"""What a callback puts in place for a run, and takes away however the run ends."""

from __future__ import annotations

from contextlib import ExitStack

from lightning_lockstep._lightning import Callback, LightningModule, Trainer


class EndsWithRun(Callback):
    """A callback that undoes what it has done to a run, also after an error, for which Lightning has another hook."""

    def __init__(self) -> None:
        super().__init__()
        # Of what is to be undone. It can be closed, and used again, any number of times.
        self.at_end = ExitStack()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take everything away. Ranks: any, alone."""
        self.at_end.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take everything away. Ranks: any, alone."""
        self.teardown(trainer, pl_module, "")
