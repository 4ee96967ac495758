"""ReplicaCheck: whether all ranks hold the same weights and work on different data, and why not."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import ReplicaMismatchError
from lightning_lockstep.replicas.audit import Audit, refuse_audit
from lightning_lockstep.replicas.checksums import folded
from lightning_lockstep.replicas.contents import Buffers, Contents, facts
from lightning_lockstep.replicas.exchange import RankChecks
from lightning_lockstep.replicas.report import start_table
from lightning_lockstep.steps.patching import replaced

_log = logging.getLogger(__name__)

# How long rank 0 waits at the end of a fit for the last checks of the others [s].
_AT_THE_END = 30.0


class ReplicaCheck(EndsWithRun):
    """Checks that all ranks hold the same weights, optimizer state and settings, and work on different data.

    Before the first step the ranks compare how the run is set up, and then, after the first batch, the fourth, every
    ``every_n_steps`` and the last one, a checksum of every tensor. A report names the tensors, the ranks in the
    minority, since when, and the likely reasons.

    Args:
        every_n_steps: Batches between two checks.
        action: ``"raise"`` raises on all ranks; ``"warn"`` reports each difference once and goes on.
        optimizer_state: Whether the state of optimizers is compared too, if several ranks hold the same.
        buffers: ``"auto"`` compares the buffers that the ranks share, and leaves out the statistics of BatchNorm
            without synchronization and others that each rank computes from its own batches; or ``"all"``, ``"none"``.
        data: Whether the batches of the ranks are compared.
        audit_every_n_steps: Batches between two audits: each rank runs the micro-batch of the rank before it, and
            loss and gradients must be the same to the bit, which finds a device that computes wrongly. 0: none.

    Raises:
        ConfigurationError: One message with every argument that cannot be used; or an audit was asked for, but no rank
            alone can make the step of another one.
        ReplicaMismatchError: With ``action="raise"``, on all ranks after the same batch.

    Ranks: every rank has one. A small gather before the first step and a broadcast after the last; between them, for
        each check, a message of each rank to rank 0 over the side channel, and no collective until there is a
        difference. An audit sends a micro-batch of each rank to the next one, between two small gathers.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 100,
        action: Literal["raise", "warn"] = "raise",
        optimizer_state: bool = True,
        buffers: Buffers = "auto",
        data: bool = True,
        audit_every_n_steps: int = 0,
    ) -> None:
        super().__init__()
        faults = Faults()
        what = "a whole number of batches"
        faults.whole("every_n_steps", every_n_steps, what=what, such_as=100)
        faults.choice("action", action, ("raise", "warn"))
        faults.flag("optimizer_state", optimizer_state)
        faults.choice("buffers", buffers, ("auto", "all", "none"))
        faults.flag("data", data)
        faults.whole("audit_every_n_steps", audit_every_n_steps, least=0, what=what, such_as=0)
        faults.raise_all()
        self.every_n_steps, self.action = every_n_steps, action
        self.optimizer_state, self.buffers, self.data = optimizer_state, buffers, data
        self.audit_every_n_steps = audit_every_n_steps
        self._checks: RankChecks | None = None  # of the fit, if there are several ranks
        self._audit: Audit | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse an audit that cannot work, and open the side channel. Ranks: all, together."""
        if stage == "fit":
            self.at_end.close()
            if self.audit_every_n_steps:
                refuse_audit(trainer)
            if current_communicator().world_size > 1:
                _ = current_communicator().side_channel
            else:
                say("ReplicaCheck compares nothing here: there is one process, as always under SPMD.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare how the run is set up on each rank. Ranks: all, together; a gather of a number each."""
        communicator = current_communicator()
        if communicator.world_size == 1:
            return
        own = facts(trainer, pl_module)
        if len({*communicator.gather(folded(own.items()))}) > 1:
            table, is_fault = start_table(dict(enumerate(communicator.gather(own))))
            text = f"the run is not set up the same on all ranks, found before the first step\n\n{table}"
            self._act(text, is_fault=is_fault)
        contents = Contents(trainer, pl_module, optimizer_state=self.optimizer_state, buffers=self.buffers)
        checks = RankChecks(
            communicator, trainer, pl_module, contents, every_n_steps=self.every_n_steps, data=self.data
        )
        self.at_end.callback(checks.close)
        # All ranks take rank 0's setting, because they must audit together.
        self._audit_every = communicator.broadcast(self.audit_every_n_steps)
        audit = Audit(trainer, pl_module, communicator) if self._audit_every else None
        self.at_end.enter_context(replaced(self, _checks=checks, _audit=audit))
        if contents.left_out and communicator.is_main:
            say(f"ReplicaCheck: {contents.left_out}.")
        checks.check()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the batch for a check or audit that is due. Ranks: all, together, if it is audited."""
        if self._checks is None:
            return
        self._checks.batch_begins(batch)
        number = self._checks.count + 1
        if self._audit is None or number % self._audit_every:
            return
        if text := self._audit.run(batch, batch_idx, self._checks.weights_checksum()):
            self._act(f"{text}\nFound before batch {number} of this fit.")
        if self._audit.stopped:
            if trainer.is_global_zero:
                _log.warning("ReplicaCheck: there are no more audits: %s", self._audit.stopped)
            self._audit = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Keep checksums of the gradients in the last step before a check."""
        if self._checks is not None:
            self._checks.take_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check if that is due, and act on what rank 0 has found. Ranks: every rank, after every batch."""
        if self._checks is not None:
            for text in self._checks.batch_done():
                self._act(text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check once more. Ranks: all, together; they wait until rank 0 has compared, and for a broadcast."""
        if self._checks is not None:
            for text in self._checks.finish(_AT_THE_END):
                self._act(text)
        self.at_end.close()

    def _act(self, text: str, *, is_fault: bool = True) -> None:
        if is_fault and self.action == "raise":
            raise ReplicaMismatchError(text)
        if current_communicator().is_main:
            _log.warning("ReplicaCheck: %s", text)
