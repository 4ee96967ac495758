"""ReplicaCheck: whether all ranks hold the same weights and work on different data, and why not."""

from __future__ import annotations

import logging
from typing import Any, Literal

from torch.optim import Optimizer

from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.distributed import Communicator, current_communicator
from lightning_lockstep.distributed.c10d_operators import ddp_of
from lightning_lockstep.errors import ReplicaMismatchError
from lightning_lockstep.replicas.audit import Audit, refuse_audit
from lightning_lockstep.replicas.checksums import Checksums, folded
from lightning_lockstep.replicas.contents import Buffers, Contents, facts, hyperparameters
from lightning_lockstep.replicas.data import PROBED, BatchRecorder
from lightning_lockstep.replicas.exchange import Check, RankChecks, differing_facts
from lightning_lockstep.replicas.report import report, start_table

_log = logging.getLogger(__name__)

# How long rank 0 waits at the end of a fit for the last checks of the others [s].
_AT_THE_END = 30.0


class ReplicaCheck(Callback):
    """Checks that all ranks hold the same weights, optimizer state and settings, and work on different data.

    Before the first step the ranks compare how the run was made. Then, after the first batch, the fourth, every
    ``every_n_steps`` and the last one, each computes an exact checksum of every tensor and sends a few numbers to
    rank 0; if those differ, the ranks meet after the same batch, and a report names the tensors, the ranks in the
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
        faults.whole("every_n_steps", every_n_steps, what="a whole number of batches", such_as=100)
        faults.choice("action", action, ("raise", "warn"))
        faults.flag("optimizer_state", optimizer_state)
        faults.choice("buffers", buffers, ("auto", "all", "none"))
        faults.flag("data", data)
        faults.whole(
            "audit_every_n_steps", audit_every_n_steps, least=0, what="a whole number of batches", such_as=0
        )
        faults.raise_all()
        self.every_n_steps, self.action = every_n_steps, action
        self.optimizer_state, self.buffers, self.data = optimizer_state, buffers, data
        self.audit_every_n_steps = audit_every_n_steps
        self._run: _Run | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse an audit that cannot work, and open the side channel. Ranks: all, together."""
        if stage == "fit":
            self._stop()
            if self.audit_every_n_steps:
                refuse_audit(trainer)
            if current_communicator().world_size == 1:
                say(
                    "ReplicaCheck compares nothing here: there is one process (under SPMD one program runs for all"
                    " devices)."
                )
            else:
                _ = current_communicator().side_channel

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare how the run was made on each rank. Ranks: all, together; a gather of a number each."""
        self._stop()
        if current_communicator().world_size > 1:
            self._run = _Run(self, trainer, pl_module)
            self._run.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the batch for a check or audit that is due. Ranks: all, together, if it is audited."""
        if self._run is not None:
            self._run.batch_begins(batch, batch_idx)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep checksums of the gradients in the last step before a check."""
        if self._run is not None:
            self._run.take_gradients(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Check if that is due, and act on what rank 0 has found. Ranks: every rank, after every batch."""
        if self._run is not None:
            self._run.batch_done()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check once more. Ranks: all, together; they wait until rank 0 has compared, and for a broadcast."""
        if self._run is not None:
            self._run.end()
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove everything. Ranks: any, alone."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remove everything. Ranks: any, alone."""
        self._stop()

    def _stop(self) -> None:
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run:
    """One fit."""

    def __init__(self, settings: ReplicaCheck, trainer: Any, module: LightningModule) -> None:
        self._settings, self._trainer, self._module = settings, trainer, module
        self._communicator: Communicator = current_communicator()
        self._contents = Contents(
            trainer, module, optimizer_state=settings.optimizer_state, buffers=settings.buffers
        )
        self._differing = differing_facts(self._communicator, facts(trainer, module))
        self._checks = RankChecks(self._communicator, trainer)
        self._batches = BatchRecorder(trainer, settings.every_n_steps) if settings.data else None
        # All ranks take rank 0's setting, because they must audit together.
        self._audit_every = self._communicator.broadcast(settings.audit_every_n_steps)
        self._audit = Audit(trainer, module, self._communicator) if self._audit_every else None
        self._trained = self._contents.trained()
        self._count = self._checked = 0
        self._gradients: dict[int, tuple[list[str], Checksums]] = {}  # by optimizer
        self._steps = [0] * len(trainer.optimizers)
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_, number=number: self._stepped(number))
            for number, optimizer in enumerate(trainer.optimizers)
            if isinstance(optimizer, Optimizer)
        ]

    def begin(self) -> None:
        if self._contents.left_out and self._communicator.is_main:
            say(f"ReplicaCheck: {self._contents.left_out}.")
        if self._differing:
            table, is_fault = start_table(self._differing)
            self._act(
                f"the run is not set up the same on all ranks, found before the first step\n\n{table}",
                is_fault=is_fault,
            )
        self._check()

    def batch_begins(self, batch: Any, index: int) -> None:
        if self._batches is not None:
            self._batches.take(batch, self._count)
        if self._audit is None or (self._count + 1) % self._audit_every:
            return
        weights = folded(self._contents.sections()["parameters"].checksums().numbers())
        text = self._audit.run(batch, index, weights)
        if text:
            self._act(f"{text}\nFound before batch {self._count + 1} of this fit.", is_fault=True)
        if self._audit.stopped:
            if self._communicator.is_main:
                _log.warning("ReplicaCheck: there are no more audits: %s", self._audit.stopped)
            self._audit = None

    def take_gradients(self, optimizer: Any) -> None:
        # Each step of an optimizer replaces what the one before has kept, so that a check sees the last step.
        if self._contents.sees_gradients and self._until_check() <= self._trainer.accumulate_grad_batches:
            named = self._contents.gradients(optimizer)
            self._gradients[id(optimizer)] = named.names, named.checksums()

    def batch_done(self) -> None:
        due = self._until_check() == 1
        self._count += 1
        if due:
            self._check()
        finding = self._checks.step_done()
        if finding is not None:
            self._act(report(finding), is_fault=True)

    def end(self) -> None:
        if self._count != self._checked:
            self._check(was_due=False)
        for finding in self._checks.finish(_AT_THE_END):
            self._act(report(finding), is_fault=True)

    def close(self) -> None:
        self._checks.close()
        for hook in self._hooks:
            hook.remove()

    def _until_check(self) -> int:
        """Return how many batches there are until the next check; 1: the current batch is checked."""
        if self._count in (0, PROBED - 1):
            return 1
        left = self._settings.every_n_steps - self._count % self._settings.every_n_steps
        return min(left, PROBED - self._count) if self._count < PROBED else left

    def _check(self, *, was_due: bool = True) -> None:
        self._checked = self._count
        row = self._batches.row() if self._batches is not None and self._count >= PROBED else []
        ddp = ddp_of(self._trainer.strategy.model)
        ignored = set(ddp.parameters_to_ignore) if ddp is not None else set()
        evidence = {
            "steps": list(self._steps),
            "statistics": self._contents.may_be_statistics(),
            "automatic": self._module.automatic_optimization,
            # Nobody looks at the gradients of a batch that turns out to be the last.
            "sees_gradients": self._contents.sees_gradients and was_due,
            "divided": self._contents.divided,
            "padding": bool(self._count) and getattr(self._trainer.strategy, "is_padding_batch", bool)(),
            "wrapped": ddp is not None,
            "synchronizes": ddp is None or ddp.require_backward_grad_sync,
            "outside": sorted(self._contents.trained() - self._trained | ignored),
        }
        settings, gradients = hyperparameters(self._trainer.optimizers), [*self._gradients.values()]
        self._checks.pending.append(Check(self._count, self._contents, settings, evidence, gradients, row))
        self._gradients = {}

    def _stepped(self, number: int) -> None:
        self._steps[number] += 1

    def _act(self, text: str, *, is_fault: bool) -> None:
        if is_fault and self._settings.action == "raise":
            raise ReplicaMismatchError(text)
        if self._communicator.is_main:
            _log.warning("ReplicaCheck: %s", text)
