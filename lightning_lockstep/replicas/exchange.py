"""Checksums on their way to rank 0, compared as soon as all have come; finer ones are asked for where they differ.

    every rank, after its n-th batch            rank 0, receiving thread
    --------------------------------            ------------------------
    check   a number for each kind   -------->  all have come: equal, or
            of tensors                <-------  ask     the first rank of each group that agrees
    answer  a number for each tensor  ------->  judge; a difference: request a stop (`stop_agreement`)
            (receiving thread)
    after the same batch on all ranks: they measure the largest differences together, and act

Nobody waits before there is a difference. A rank that is late delays the comparison of that check, and nothing else;
one that is gone ends the run by other means. Where rank 0 is frozen nothing is compared.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._text import ranks_in_words
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.coordination.stop_agreement import StepAgreement
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.replicas.checksums import Checksums, folded
from lightning_lockstep.replicas.contents import SECTIONS, Named
from lightning_lockstep.replicas.data import BatchComparison, Row
from lightning_lockstep.replicas.report import NAMED, Differences, Finding, Parts, judge

_log = logging.getLogger(__name__)

# Checks whose numbers for each tensor a rank keeps, for the case that rank 0 asks. Where no gradients are reduced,
# ranks do not wait for each other, and rank 0 asks late.
_KEPT = 8
# Groups of ranks that agree of which rank 0 asks one.
_ASKED = 16

_fits = itertools.count()


class Check:
    """What one rank sends of one check, once its numbers are there."""

    def __init__(
        self,
        count: int,  # batches of the fit before it
        sections: Mapping[str, Named],
        settings: Mapping[str, str],
        evidence: Mapping[str, Any],  # see `judge`
        gradients: Sequence[tuple[list[str], Checksums]],  # of each optimizer
        row: Row,
    ) -> None:
        self.count, self.settings, self.evidence, self.row = count, settings, evidence, row
        self._sums = {section: (named.names, named.checksums()) for section, named in sections.items()}
        self._gradients = gradients

    def ready(self) -> bool:
        return all(sums.ready() for _, sums in self._sums.values())

    def read(self) -> None:
        """Take the numbers from the device."""
        self.numbers = {
            section: dict(zip(names, sums.numbers(), strict=True))
            for section, (names, sums) in self._sums.items()
        }
        self.gradients = {
            name: number
            for names, sums in self._gradients
            for name, number in zip(names, sums.numbers(), strict=True)
        }

    def coarse(self) -> dict[str, Any]:
        folds = [folded(self.numbers[section].values()) for section in SECTIONS]
        return {"count": self.count, "folds": [*folds, folded(self.settings.items())], "row": self.row}

    def fine(self, before: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        own = {"sums": self.numbers, "before": before, "settings": self.settings, "gradients": self.gradients}
        return {**own, **self.evidence}


class RankChecks:
    """Sends the checks of this rank, and answers what rank 0 asks; one object on every rank for each fit."""

    def __init__(
        self, communicator: Communicator, fit: int, same_batches: Callable[[int, Sequence[int]], str]
    ) -> None:
        self._channel = communicator.side_channel
        self._pending: deque[Check] = deque()
        self._done: deque[tuple[Check, Mapping[str, Mapping[str, int]]]] = deque(maxlen=_KEPT)
        self._before: Mapping[str, Mapping[str, int]] = {section: {} for section in SECTIONS}
        # What belongs to an earlier fit has another topic.
        self._topic = f"replica/{fit}"
        self._agreement = StepAgreement(self._channel, name=self._topic)
        self._remove = self._channel.on(f"{self._topic}/ask", self._answer)
        self._comparison: Comparison | None = None
        if communicator.is_main:
            self._comparison = Comparison(self._channel, self._topic, self._agreement, same_batches)

    def add(self, check: Check) -> None:
        """Send a check as soon as its numbers are there."""
        self._pending.append(check)

    def step_done(self) -> Finding | None:
        """Send what is ready; return the difference for which all ranks meet after this batch, if they do."""
        while self._pending and self._pending[0].ready():
            self._send(self._pending.popleft())
        decision = self._agreement.passed()
        if decision is None:
            return None
        self._agreement.start_over()  # all ranks are here
        return finding_of(decision.requests[0].reason)

    def finish(self, timeout: float) -> str:  # of rank 0 [s]
        """Send all; on rank 0 wait until they are compared and return as JSON what was found and not told yet."""
        while self._pending:
            self._send(self._pending.popleft())
        comparison, last = self._comparison, self._done[-1][0].count
        if comparison is None:
            return ""
        with comparison.news:
            if not self._channel.wait_for(comparison.news, lambda: comparison.is_done(last), timeout):
                _log.warning(
                    "ReplicaCheck: the check after the last batch was not compared: nothing came from %s within %.0f s",
                    ranks_in_words(comparison.missing(last)),
                    timeout,
                )
            return comparison.untold

    def told(self) -> None:
        """Note on rank 0 that all ranks know what was found."""
        if self._comparison is not None:
            self._comparison.untold = ""

    def close(self) -> None:
        self._agreement.close()
        self._remove()
        if self._comparison is not None:
            self._comparison.close()

    def _send(self, check: Check) -> None:
        check.read()
        self._done.append((check, self._before))
        self._before = check.numbers
        self._channel.post(f"{self._topic}/check", check.coarse(), to=0)

    def _answer(self, message: Message) -> None:
        count = message.body
        fine = next((check.fine(before) for check, before in list(self._done) if check.count == count), None)
        self._channel.post(f"{self._topic}/answer", {"count": count, "fine": fine}, to=0)


class Comparison:
    """On rank 0: takes the checks of all ranks, in whatever order they come, and compares each once."""

    def __init__(
        self,
        channel: SideChannel,
        topic: str,
        agreement: StepAgreement,
        same_batches: Callable[[int, Sequence[int]], str],  # what to say of a loader and ranks, or nothing
    ) -> None:
        self.news = threading.Condition(threading.RLock())  # notified of each message
        self.untold = ""  # what was found, as JSON, until all ranks know it
        self._channel, self._topic, self._agreement = channel, topic, agreement
        self._same_batches = same_batches
        self._checks: dict[int, dict[int, Any]] = {}  # by count and rank
        self._asked: dict[int, tuple[Parts, dict[int, Any]]] = {}  # by count: groups, and who has answered
        self._compared = -1  # batches before the last check that all ranks have sent
        self._good: int | None = None  # the same of the last one without a difference
        self._known: set[str] = set()  # tensors and settings that were told
        self._statistics: set[str] = set()  # buffers in which each rank has its own
        self._data = BatchComparison()
        self._removes = [
            channel.on(f"{topic}/check", self._take_check),
            channel.on(f"{topic}/answer", self._take_answer),
        ]

    def close(self) -> None:
        for remove in self._removes:
            remove()

    def is_done(self, count: int) -> bool:
        """Return whether the check after so many batches is compared, and each before it."""
        return self._compared >= count and not self._asked

    def missing(self, count: int) -> list[int]:
        """Return the ranks whose check, or whose answer about it, has not come."""
        groups, answers = self._asked.get(count, ([], {}))
        there = self._checks.get(count, answers)
        wanted = [group[0] for group in groups] or range(self._channel.world_size)
        return [rank for rank in wanted if rank not in there]

    def _take_check(self, message: Message) -> None:
        body = message.body
        with self.news:
            count = body["count"]
            of_count = self._checks.setdefault(count, {})
            of_count[message.sender] = body
            if len(of_count) == self._channel.world_size:
                del self._checks[count]
                self._compare(count, of_count)
            self.news.notify_all()

    def _take_answer(self, message: Message) -> None:
        body = message.body
        with self.news:
            groups, answers = self._asked.get(body["count"], ([], {}))
            answers[message.sender] = body["fine"]
            if groups and len(answers) == len(groups):
                del self._asked[body["count"]]
                # One that is so late that a rank has forgotten the numbers: the next check will find it too.
                if all(answers.values()):
                    self._judge(body["count"], groups, answers)
            self.news.notify_all()

    def _compare(self, count: int, checks: Mapping[int, Any]) -> None:
        self._compared = count
        same = self._data.compare({rank: check["row"] for rank, check in checks.items()})
        if same is not None and (text := self._same_batches(*same)):
            self._report(Finding(count=count, data=text), {"data"})
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(checks):
            ranks_of.setdefault(tuple(checks[rank]["folds"]), []).append(rank)
        if len(ranks_of) == 1:
            self._good = count
            return
        groups = sorted(ranks_of.values(), key=lambda ranks: (-len(ranks), ranks))[:_ASKED]
        self._asked[count] = groups, {}
        self._channel.post(f"{self._topic}/ask", count, to=[group[0] for group in groups])

    def _judge(self, count: int, groups: Parts, answers: Mapping[int, Any]) -> None:
        finding = judge(count, self._good, groups, answers, self._statistics)
        if finding is None:
            self._good = count
        else:
            names = {*finding.settings, *(name for of_kind in finding.tensors.values() for name in of_kind)}
            self._report(finding, names)

    def _report(self, finding: Finding, names: set[str]) -> None:
        # One at a time: later checks find what else there is.
        if not self.untold and not names <= self._known:
            self._known |= names
            self.untold = json.dumps(asdict(finding))
            self._agreement.request(self.untold, kind="replica")


def finding_of(text: str) -> Finding:
    return Finding(**json.loads(text))


# -- What all ranks do together once there is a difference --


def differing_facts(
    communicator: Communicator, facts: Mapping[str, str]
) -> tuple[int, dict[int, dict[str, str]]]:
    """Return the number that rank 0 draws for this fit, and what each rank has told if they do not say the same.

    A rank may have begun fits that others have not reached. Ranks: all, together.
    """
    told = communicator.gather((next(_fits), folded(facts.items())))
    fit = told[0][0]
    if len({fold for _, fold in told}) == 1:
        return fit, {}
    return fit, dict(enumerate(communicator.gather(dict(facts))))


def largest_differences(
    communicator: Communicator, finding: Finding, sections: Mapping[str, Named]
) -> Differences:
    """Return how far the first tensors that differ are from those of the reference. Ranks: all, together."""
    own: dict[str, tuple[float, int, int, int]] = {}
    for section, names in finding.tensors.items():
        tensors = dict(zip(sections[section].names, sections[section].tensors, strict=True))
        for name in list(names)[:NAMED]:
            mine = tensors[name].detach().cpu() if name in tensors else None
            other = communicator.broadcast(mine, finding.reference)
            if (
                mine is not None
                and other is not None
                and mine.shape == other.shape
                and mine.dtype == other.dtype
            ):
                own[name] = _difference(mine, other)
    found: dict[str, dict[int, tuple[float, int, int, int]]] = {}
    for rank, of_rank in enumerate(communicator.gather(own)):
        for name, difference in of_rank.items():
            found.setdefault(name, {})[rank] = difference
    return found


def _difference(mine: Tensor, other: Tensor) -> tuple[float, int, int, int]:
    """Return the largest difference, how many values differ, how many there are, and the bits that differ."""
    if mine.is_complex():
        mine, other = torch.view_as_real(mine), torch.view_as_real(other)
    mine, other = mine.contiguous().reshape(-1), other.contiguous().reshape(-1)
    flips = mine.view(torch.uint8) ^ other.view(torch.uint8)
    bits = sum(int(((flips >> bit) & 1).sum()) for bit in range(8)) if flips.numel() else 0
    differing = (flips.view(len(mine), -1) != 0).any(dim=1)
    distance = (mine[differing].double() - other[differing].double()).abs()
    largest = float(distance.nan_to_num(float("inf")).max()) if len(distance) else 0.0
    return largest, int(differing.sum()), len(mine), bits
