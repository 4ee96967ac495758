"""Checksums on their way to rank 0, compared as soon as all have come; if they differ, all ranks meet.

    every rank, after the same batches            rank 0, receiving thread
    --------------------------------              ------------------------
    check: a number for all that      --------->  all have come: equal, or note what is to be asked
           is to be equal                         and request a stop (`stop_agreement`)
    after the same batch on all ranks: rank 0 sends its questions; for each, the first rank of each group that agrees
    sends a number for each tensor to all; every rank judges and acts, as all others do

What is divided, as in hybrid sharding, has a number for itself, with the ranks that hold the same; those alone are
compared, and only they answer.

Nobody waits before there is a difference. A rank that is late delays the comparison of that check, and nothing else;
one that is gone ends the run by other means. If rank 0 is frozen, nothing is compared.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule
from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed import Communicator, Gather
from lightning_lockstep.distributed.coordination.stop_agreement import StepAgreement
from lightning_lockstep.distributed.ddp_reducer import ddp_of
from lightning_lockstep.distributed.failure.attempt import attempt_on
from lightning_lockstep.replicas.checksums import (
    PROBED,
    BatchComparison,
    BatchRecorder,
    Checksums,
    folded,
    row_of,
    same_batches_text,
)
from lightning_lockstep.replicas.contents import Contents, hyperparameters
from lightning_lockstep.replicas.report import Finding, judge, parts_of

_log = logging.getLogger(__name__)

# A rank keeps the numbers of this many checks until the ranks meet. If no gradients are reduced, ranks do not wait
# for each other, and rank 0 asks late.
_KEPT = 8
# This many groups of ranks that agree are asked, one rank of each.
_ASKED = 16
# The answer if a rank came so late that another had forgotten the check. It has no names, so nothing is reported, and
# the next check finds the difference again.
_FORGOTTEN = Finding(set(), "")


class Question(NamedTuple):
    """What all ranks are to find out together, after a check that differed."""

    batches: int  # before the check
    good: int | None  # batches before the last check that found no difference
    groups: Sequence[Sequence[int]] = ()  # ranks that agree with each other, if tensors or settings differ
    held: tuple[int, ...] = ()  # the ranks that hold what differs; none: all do
    data: str = ""  # what is wrong with the data, if that is it


class Check:
    """What one rank sends of one check, once its numbers are there."""

    def __init__(
        self,
        count: int,  # batches of the fit before it
        contents: Contents,
        settings: Mapping[str, str],
        evidence: Mapping[str, Any],  # see `judge`
        gradients: Sequence[Checksums],  # of each optimizer
        row: Sequence[Sequence[Checksums]],  # of the last batches, for each loader
    ) -> None:
        self.count, self.settings, self.evidence, self.row = count, settings, evidence, row
        self._sums = {section: Checksums(named) for section, named in contents.sections().items()}
        self._held = dict(contents.held)  # by name of what is divided: the ranks that hold the same
        self._gradients = gradients
        self.numbers: dict[str, dict[str, int]] = {}  # by section; this and the next two are set by `read`
        self.gradients: dict[str, int] = {}
        self._changed: list[str] = []

    def ready(self) -> bool:
        return all(sums.ready() for sums in self._sums.values())

    def read(self, before: Mapping[str, int]) -> dict[str, int]:
        """Take the numbers from the device, see which changed since the last check, and return all."""
        self.numbers = {section: sums.numbers() for section, sums in self._sums.items()}
        now = {name: number for numbers in self.numbers.values() for name, number in numbers.items()}
        self._changed = [name for name, number in now.items() if before.get(name) != number]
        self.gradients = {name: number for sums in self._gradients for name, number in sums.numbers().items()}
        return now

    def summary(self, own_buffers: Collection[str]) -> dict[str, Any]:
        """Return a number for all that is to be equal, for each set of ranks that hold the same."""
        values: dict[tuple[int, ...], list[Any]] = {(): [*self.settings.items()]}  # by who holds the same
        for numbers in self.numbers.values():
            for name, number in numbers.items():
                if name not in own_buffers:
                    values.setdefault(self._held.get(name, ()), []).append(number)
        folds = [(ranks, folded(of_ranks)) for ranks, of_ranks in values.items()]
        return {"count": self.count, "folds": folds, "row": row_of(self.row)}

    def details(self, held: tuple[int, ...]) -> dict[str, Any]:
        """Return the numbers of what these ranks hold; without ranks, of what is whole on each rank."""

        def chosen(numbers: Mapping[str, int]) -> dict[str, int]:
            return {name: one for name, one in numbers.items() if self._held.get(name, ()) == held}

        sums = {section: chosen(numbers) for section, numbers in self.numbers.items()}
        seen = {"sums": sums, "changed": self._changed, "gradients": chosen(self.gradients)}
        return {**seen, "settings": self.settings, **self.evidence}


class RankChecks:
    """The checks of this rank in one fit: makes and sends them, and meets the others if there is a difference."""

    def __init__(
        self,
        communicator: Communicator,
        trainer: Any,
        module: LightningModule,
        contents: Contents,
        *,
        every_n_steps: int,
        data: bool,
    ) -> None:
        self._communicator = communicator
        self._trainer, self._module, self._contents = trainer, module, contents
        self._place = f"{communicator.host}, {trainer.strategy.root_device}"
        self.count = self._checked = 0  # batches of this fit; those before the last check
        self._every = every_n_steps
        self._batches = BatchRecorder(trainer, every_n_steps, active=data)
        self._trained = contents.trained()
        self._gradients: dict[int, Checksums] = {}  # by optimizer
        self._steps = [0] * len(trainer.optimizers)
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_, number=number: self._stepped(number))
            for number, optimizer in enumerate(trainer.optimizers)
            if isinstance(optimizer, Optimizer)
        ]
        self._pending: deque[Check] = deque()  # sent as soon as their numbers are there
        self._sent = 0
        self._done: deque[Check] = deque(maxlen=_KEPT)
        self._before: dict[str, int] = {}  # the numbers of the last check
        self._statistics: set[str] = set()  # buffers in which each rank has its own
        self._known: set[str] = set()  # tensors and settings that were told
        topic = attempt_on(communicator.side_channel).topic("replica")  # no two fits share one
        self._agreement = StepAgreement(communicator.side_channel, name=topic)
        self._gather = Gather(communicator.side_channel, f"{topic}/check")
        self._comparison: Comparison | None = None
        if communicator.is_main:
            self._comparison = Comparison(self._gather, self._agreement, trainer)

    # -- as the fit goes on --

    def batch_begins(self, batch: Any) -> None:
        self._batches.take(batch, self.count)

    def take_gradients(self, optimizer: Any) -> None:
        # Each step of an optimizer replaces what the one before has kept, so that a check sees the last step.
        if self._contents.sees_gradients and self._until_check() <= self._trainer.accumulate_grad_batches:
            self._gradients[id(optimizer)] = Checksums(self._contents.gradients(optimizer))

    def batch_done(self) -> list[str]:
        """Check if that is due, and send what is ready; return new differences, if all ranks meet now for them."""
        due = self._until_check() == 1
        self.count += 1
        if due:
            self.check()
        while self._pending and self._pending[0].ready():
            self._send(self._pending.popleft())
        if self._agreement.passed() is None:
            return []
        self._agreement.start_over()  # all ranks are here
        return self._meet()

    def close(self) -> None:
        self._agreement.close()
        self._gather.close()
        for hook in self._hooks:
            hook.remove()

    def weights_checksum(self) -> int:
        return folded(Checksums(self._contents.sections()["parameters"]).numbers().values())

    def _until_check(self) -> int:
        """Return how many batches there are until the next check; 1: the current batch is checked."""
        if self.count in (0, PROBED - 1):
            return 1
        left = self._every - self.count % self._every
        return min(left, PROBED - self.count) if self.count < PROBED else left

    def check(self, *, was_due: bool = True) -> None:
        """Begin a check of what the rank holds now."""
        self._checked = self.count
        row = self._batches.row() if self.count >= PROBED else []
        ddp = ddp_of(self._trainer.strategy.model)
        ignored = set(ddp.parameters_to_ignore) if ddp is not None else set()
        evidence = {
            "steps": list(self._steps),
            "statistics": self._contents.may_be_statistics(),
            "automatic": self._module.automatic_optimization,
            # Nobody looks at the gradients of a batch that turns out to be the last.
            "sees_gradients": self._contents.sees_gradients and was_due,
            "divided": self._contents.divided,
            "padding": bool(self.count) and getattr(self._trainer.strategy, "is_padding_batch", bool)(),
            "wrapped": ddp is not None,
            "synchronizes": ddp is None or ddp.require_backward_grad_sync,
            "outside": sorted(self._contents.trained() - self._trained | ignored),
        }
        settings, gradients = hyperparameters(self._trainer.optimizers), [*self._gradients.values()]
        self._pending.append(Check(self.count, self._contents, settings, evidence, gradients, row))
        self._gradients = {}

    def _stepped(self, number: int) -> None:
        self._steps[number] += 1

    def _send(self, check: Check) -> None:
        self._before = check.read(self._before)
        self._done.append(check)
        self._gather.post(self._sent, check.summary(self._statistics), for_all=False)
        self._sent += 1

    # -- when there is a difference, and at the end --

    def finish(self, timeout: float) -> list[str]:  # of rank 0 [s]
        """Check once more, and wait until rank 0 has compared all; return new differences. Ranks: all, together."""
        if self.count != self._checked:
            self.check(was_due=False)
        while self._pending:
            self._send(self._pending.popleft())
        self._gather.timeout = timeout
        if missing := self._gather.collect("end", None, for_all=False).missing:
            _log.warning(
                "ReplicaCheck: the check after the last batch was not compared: nothing came from %s within %.0f s",
                ranks_in_words(missing),
                timeout,
            )
        return self._meet()

    def _meet(self) -> list[str]:
        """Return the differences about which rank 0 asks, but for those that were told. Ranks: all, together."""
        comparison = self._comparison
        asked = self._communicator.broadcast([] if comparison is None else comparison.take_questions())
        findings = [self._found(question) for question in asked]
        if comparison is not None and asked and not any(findings):
            comparison.note_equal(asked[-1].batches)
        texts = []
        for finding in filter(None, findings):
            if not finding.names <= self._known:
                self._known |= finding.names
                texts.append(finding.text)
        return texts

    def _found(self, asked: Question) -> Finding | None:
        """Return the answer of all ranks to a question; ``None`` if there is no difference."""
        if asked.data:
            return Finding({"data"}, asked.data)
        own = next((check.details(asked.held) for check in self._done if check.count == asked.batches), None)
        told: list[Any] = [self._communicator.broadcast(own, group[0]) for group in asked.groups]
        places = self._communicator.gather(self._place)
        if None in told:
            return _FORGOTTEN
        answers = {rank: answer for group, answer in zip(asked.groups, told, strict=True) for rank in group}
        return judge(asked.batches, asked.good, answers, places, self._statistics, asked.held)


class Comparison:
    """On rank 0: takes the checks of all ranks, in whatever order they come, and compares each once."""

    def __init__(self, gather: Gather, agreement: StepAgreement, trainer: Any) -> None:
        self._lock = threading.RLock()
        self._compared = 0  # checks
        self._questions: list[list[Question]] = []  # why the ranks are to meet, by check
        self._gather, self._agreement, self._trainer = gather, agreement, trainer
        self._good: int | None = None  # batches before the last check that found no difference
        self._data = BatchComparison()
        gather.on_entry = self._look

    def take_questions(self) -> list[Question]:
        """Return what all ranks, which have met, are to find out."""
        with self._lock:
            asked, self._questions = self._questions, []
            return [question for of_check in asked for question in of_check]

    def note_equal(self, count: int) -> None:
        """Note that a check has found no difference after all."""
        with self._lock:
            self._good = max(count, self._good or 0)

    def _look(self) -> None:
        """Compare the checks that have come from all ranks."""
        with self._lock:
            while checks := self._gather.take(self._compared):
                self._compared += 1
                self._compare(checks[0]["count"], checks)

    def _compare(self, count: int, checks: Mapping[int, Any]) -> None:
        # By who holds the same, the number of each rank for it.
        folds: dict[tuple[int, ...], dict[int, int]] = {}
        for rank, check in checks.items():
            for held, fold in check["folds"]:
                folds.setdefault(tuple(held), {})[rank] = fold
        differing = sorted(held for held, of_ranks in folds.items() if len({*of_ranks.values()}) > 1)
        if not differing:
            self._good = count
        wrong: list[Question] = []
        same = self._data.compare({rank: check["row"] for rank, check in checks.items()})
        if same is not None and (text := same_batches_text(self._trainer, *same)):
            text += f" Seen in the last batches up to batch {count} of this fit."
            wrong.append(Question(count, self._good, data=text))
        # First what is whole on all ranks.
        asked = ((held, parts_of(folds[held])[:_ASKED]) for held in differing[:_ASKED])
        wrong += [Question(count, self._good, groups, held) for held, groups in asked]
        if wrong:
            if not self._questions:
                self._agreement.request("replicas differ", kind="replica")
            self._questions[1:] = [wrong]  # those of the first check that differed stay
