"""What must come of a program, by a plain loop of torch on one process, and how what came of it differs.

Nothing here knows how the package divides a loader. From the program's own order follow the samples of each optimizer
step; its gradient is the mean over what they contribute; and a value of an epoch is that of all its samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from benchmarks.same_numbers import model as models
from benchmarks.same_numbers.fit import Outcome
from benchmarks.same_numbers.program import BY_BATCH, REFUSALS, Program

#: The largest differences of weights in float64, of those in float32 (DeepSpeed's), and of logged values, which
#: Lightning keeps in float32, as parts of their size.
EXACT, SINGLE, LOGGED = 1e-12, 2e-5, 2e-5
#: The samples of each batch that a run on one rank gave, by epoch.
Order = Sequence[Sequence[Sequence[int]]]


@dataclass
class MicroBatch:
    """Samples that all ranks take together."""

    samples: list[int]
    taken: int  # samples, or own batches, of the loader
    even: bool = True  # whether each rank has as many


@dataclass
class Expected:
    """What must come of a program."""

    steps: list[tuple[int, Tensor]] = field(default_factory=list)  # epoch, weights after it
    stopped: int = 0  # how many of them come before the stop
    interrupted: int = -1  # the epoch in which the fit stops
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    at_step: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    test: dict[str, float] = field(default_factory=dict)


class PlainLoop:
    """Trains on one process, and keeps what must come of it."""

    def __init__(self, program: Program, order: Order | None) -> None:
        self.program, self.order, self.expected = program, order, Expected()
        self.model = models.make_model(program)
        self.optimizer = models.optimizer(program, self.model)
        self.begun = self.done = 0
        windows = [list(self.windows(epoch)) for epoch in range(program.epochs)]
        self.total = sum(map(len, windows))
        for epoch, of_epoch in enumerate(windows):
            self.epoch(epoch, of_epoch)
        self.expected.test = self.evaluated("test", program.test)

    def windows(self, epoch: int) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each optimizer step."""
        given = given_in(self.program, self.order, epoch)
        while given:
            stopped = self.program.stop and self.begun >= self.program.stop
            parts = micro_batches(self.program.on(self.program.resume_ranks) if stopped else self.program, given)
            if self.program.second:
                yield from (
                    parts[n : n + self.program.accumulate] for n in range(0, len(parts), self.program.accumulate)
                )
                return
            yield parts[: self.program.accumulate]
            self.begun += 1
            given = given[sum(part.taken for part in parts[: self.program.accumulate]) :]

    def epoch(self, epoch: int, windows: list[list[MicroBatch]]) -> None:
        logged: list[int] = []
        losses: list[float] = []
        micro = 0
        for window in windows:
            shares: list[tuple[int, float]] = []
            left_out = 0  # samples of batches that are None: as in Lightning, the mean is not divided by fewer
            for part in window:
                samples = [one for one in part.samples if one not in self.program.corrupt]
                logged += samples
                losses += self.losses_now(samples)
                self.expected.at_step[epoch, micro] = _step_values(self.program, samples, part.even)
                shares += [(one, self.weight(one, micro)) for one in samples]
                left_out += 0 if self.program.loss == "items" else len(part.samples) - len(samples)
                if self.program.loss == "manual":
                    self.step(epoch, shares)
                    shares = []
                micro += 1
            self.step(epoch, shares, left_out)
            self.done += 1
            if self.done == self.program.stop:
                self.expected.stopped, self.expected.interrupted = len(self.expected.steps), epoch
        values = _values("train", self.program, logged, losses)
        self.expected.epochs[epoch] = values | self.evaluated("val", self.program.validation)

    def weight(self, sample: int, micro: int) -> float:
        """Return what a sample contributes to the sum of its step."""
        if self.program.loss == "items":
            return models.items(sample)
        if self.program.loss == "none":
            return float(micro % 3 != 1)
        return float(self.program.loss != "skip" or sample % 3 != 1)

    def losses(self, samples: Sequence[int]) -> Tensor:
        inputs = torch.stack([models.features(self.program, one) for one in samples])
        targets = torch.tensor([models.target(one) for one in samples], dtype=torch.float64)
        return models.losses(self.model, inputs, targets)

    def losses_now(self, samples: Sequence[int]) -> list[float]:
        return self.losses(samples).tolist() if samples else []

    def step(self, epoch: int, shares: list[tuple[int, float]], left_out: int = 0) -> None:
        """Step by the mean over samples, or over items, if one of them counts."""
        weights = torch.tensor([weight for _, weight in shares], dtype=torch.float64)
        if not weights.sum():
            return
        self.optimizer.zero_grad()
        count = weights.sum() if self.program.loss == "items" else len(shares) + left_out
        ((self.losses([one for one, _ in shares]) * weights).sum() / count).backward()
        if self.program.clip == "norm":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), models.LARGEST)
        elif self.program.clip == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), models.LARGEST)
        if self.program.schedule:
            self.optimizer.param_groups[0]["lr"] = models.RATE * (1 - self.done / self.total)
        self.optimizer.step()
        self.expected.steps.append((epoch, models.vector(self.model)))

    def evaluated(self, stage: str, samples: int) -> dict[str, float]:
        p = self.program
        if p.eval_order in BY_BATCH:
            drops = p.drop_last and p.eval_order != "items"  # no loader drops an item
            numbers = _joined(models.own_batches(p.eval_order, samples, p.eval_batch, drops))
        else:
            # A batch of an evaluation is only a way to get through it: all ranks drop what one process drops.
            numbers = list(range(samples // p.eval_batch * p.eval_batch if p.drop_last else samples))
        values = _values(stage, p, numbers, self.losses_now(numbers))
        if p.eval_loaders == 1:
            return values
        return {f"{name}/dataloader_idx_{n}": one for name, one in values.items() for n in range(p.eval_loaders)}


def given_in(program: Program, order: Order | None, epoch: int) -> list[int] | list[list[int]]:
    """Return the samples of an epoch, or the batches if ranks take turns, as the program's own loader gives them."""
    if program.order in BY_BATCH:
        own = models.own_batches(program.order, program.samples, program.batch, program.drop_last)
        return own if order is None else [list(batch) for batch in order[epoch]]
    numbers = models.own_order(program.order, program.samples, epoch)
    return (numbers if order is None else _joined(order[epoch]))[: program.given]


def micro_batches(program: Program, given: Sequence[int] | Sequence[list[int]]) -> list[MicroBatch]:
    """Return what all ranks take together, one after the other."""
    if program.order in BY_BATCH:
        groups = _parts(given, program.ranks)
        even = [len(group) == program.ranks and len(set(map(len, group))) == 1 for group in groups]
        return [MicroBatch(_joined(group), len(group), one) for group, one in zip(groups, even, strict=True)]
    size = program.effective or program.global_batch
    first = _parts(given, size)
    if not program.second:
        return [MicroBatch(list(part), len(part), len(part) == size) for part in first]
    other = _parts(range(models.SECOND, models.SECOND + program.second), size)
    most, both = max(len(first), len(other)), list(zip(first, other, strict=False))
    together = {
        "min_size": [[*one, *two] for one, two in both],
        "max_size": [[*one, *two] for one, two in zip_longest(first, other, fillvalue=())],
        "max_size_cycle": [[*first[n % len(first)], *other[n % len(other)]] for n in range(most)],
    }
    return [MicroBatch(list(part), len(part)) for part in together[program.mode]]


def _parts(given: Sequence, size: int) -> list[Sequence]:  # type: ignore[type-arg]
    return [given[n : n + size] for n in range(0, len(given), size)]


def _joined(batches: Sequence[Sequence[int]]) -> list[int]:
    return [one for batch in batches for one in batch]


def _step_values(program: Program, samples: list[int], even: bool) -> dict[str, float]:
    """Return what is logged at a step: docs/same-run.md promises no mean of ranks that have other numbers."""
    values = [models.value(one) for one in samples]
    made = {"step_sum_sync": sum(values), "step_max_sync": max(values, default=0.0)}
    if even and values:
        made["step_mean_sync"] = sum(values) / len(values)
    return {f"train_{name}": one for name, one in made.items() if name in program.values}


def _values(stage: str, program: Program, samples: Sequence[int], losses: Sequence[float]) -> dict[str, float]:
    """Return what must be logged of an epoch."""
    if not samples:
        return {}
    values = [models.value(one) for one in samples]
    mean = sum(values) / len(values)
    made = {"mean": mean, "metric": mean, "sum": sum(values), "max": max(values), "min": min(values)}
    made |= {"loss": sum(losses) / len(losses), "list": sum(values) + 1000 * len(values)}
    return {f"{stage}_{name}": made[name.partition("_")[0]] for name in program.values if name[:5] != "step_"}


# -- The verdict --


@dataclass(frozen=True)
class Part:
    """What came of a fit, or of what comes before or after its stop."""

    name: str  # whole, before the stop, resumed, or on one rank
    outcomes: Sequence[Outcome]  # by rank


@dataclass(frozen=True)
class Verdict:
    """Whether a program is right."""

    differences: list[str]  # each begins with its kind and a colon
    refused: str = ""  # the sentence of the known limit, if the program was refused for one


def judge(program: Program, parts: Sequence[Part], order: Order | None) -> Verdict:
    """Compare what came of a program with what must."""
    for part in parts:
        if any(one.error for one in part.outcomes):
            return _ended(program, part)
    illegal = list(_illegal(program, order)) if order is not None else []
    if illegal:
        return Verdict(illegal)
    wanted = PlainLoop(dataclasses.replace(program, real=False), order).expected
    if program.real:  # what is drawn is the package's choice, so the weights are those of its run on one rank
        (alone,) = (part.outcomes[0] for part in parts if part.name == "on one rank")
        wanted.steps = list(_moves(models.vector(models.make_model(program)), alone.weights, 10 * EXACT))
    found: dict[str, list[int]] = {}
    for part in parts:
        for rank, outcome in enumerate(part.outcomes if part.name != "on one rank" else ()):
            for line in _compare(program, wanted, part.name, outcome):
                found.setdefault(f"{line} ({part.name}, rank", []).append(rank)
    told = [f"{line} {', '.join(map(str, ranks))})" for line, ranks in found.items()]
    return Verdict(told + [f"seen {part.name}: {_seen(part)}" for part in parts if told])


def _ended(program: Program, part: Part) -> Verdict:
    """Return the verdict of a part in which something was raised."""
    # A rank that comes late to an error of all may be stopped by the first one that raises it.
    raised = list(enumerate(part.outcomes))
    own = [(rank, one) for rank, one in raised if not one.error.startswith("RankFailedError")]
    raised = own if any(one.refused for _, one in own) else raised
    texts: dict[str, list[int]] = {}
    for rank, one in raised:
        texts.setdefault(one.error, []).append(rank)
    early = len(texts) == 1 and all(one.refused and not one.weights for _, one in raised)
    is_late = "" not in texts
    for limit in REFUSALS:
        if limit.holds(program) and (early or (limit.late and is_late)):
            return Verdict([], limit.sentence)
    kind = "refused" if early else "error"
    return Verdict([f"{kind}: {part.name}, rank {ranks}: {text}" for text, ranks in texts.items() if text])


def _illegal(program: Program, order: Order) -> Iterator[str]:
    """Yield in what an order that was drawn is none that its sampler can draw."""
    can = range(0, program.samples, 2 if program.order == "subset" else 1)
    able = {number for number in can if program.order != "weighted" or (number + 1) % 3}
    repeats = program.order in ("weighted", "num_samples")
    if len(order) != program.epochs:
        yield f"order: {len(order)} epochs, {program.epochs} expected"
    for epoch, batches in enumerate(order):
        numbers = _joined(batches)
        once = repeats or len(set(numbers)) == len(numbers)
        if len(numbers) != program.given or not set(numbers) <= able or not once:
            yield f"order: epoch {epoch} on one rank: {[list(batch) for batch in batches]}"


def _compare(program: Program, wanted: Expected, part: str, outcome: Outcome) -> Iterator[str]:
    halves = {"before the stop": slice(wanted.stopped), "resumed": slice(wanted.stopped, None)}
    steps = wanted.steps[halves.get(part, slice(None))]
    start = wanted.steps[wanted.stopped - 1][1] if part == "resumed" else models.vector(models.make_model(program))
    if program.strategy == "fsdp":  # it shows its whole weights at the end of an epoch
        steps = list({epoch: (epoch, weights) for epoch, weights in steps}.values())
    yield from _weights(program, start, steps, outcome.weights)
    if part == "whole" and [epoch for epoch, _ in outcome.epochs] != list(wanted.epochs):
        yield f"values: epochs {[epoch for epoch, _ in outcome.epochs]}, expected {list(wanted.epochs)}"
    for epoch, values in outcome.epochs:
        of_epoch = wanted.epochs.get(epoch, {})
        if epoch == wanted.interrupted:  # what is logged of an epoch is not in a checkpoint made within it
            of_epoch = {name: one for name, one in of_epoch.items() if name[:3] == "val" and part == "resumed"}
        yield from _logged(f"values: epoch {epoch}", of_epoch, values)
    for epoch, micro, values in outcome.steps if part != "resumed" else ():
        of_step = wanted.at_step.get((epoch, micro), {})
        yield from _logged(f"step values: epoch {epoch}, batch {micro}", of_step, values)
    if part != "before the stop":
        yield from _logged("values: test", wanted.test, outcome.test)


Steps = Sequence[tuple[int, Tensor]]


def _weights(program: Program, start: Tensor, wanted: Steps, seen: Steps) -> Iterator[str]:
    tolerance = SINGLE if program.strategy[:4] == "zero" else EXACT
    wanted, seen = _moves(start, wanted, 10 * tolerance), _moves(start, seen, 10 * tolerance)
    for number, ((epoch, one), (other_epoch, other)) in enumerate(zip(wanted, seen, strict=False)):
        far = float((one - other).abs().max())
        if not far <= tolerance or epoch != other_epoch:
            told = f"weights: step {number} of epoch {epoch} is off by {far:.2g}"
            if program.model == "shares" and (program.optimizer, program.clip, program.schedule) == (
                "sgd",
                "",
                False,
            ):
                told += f": the shares of the samples are {_shares(start, other)}, not {_shares(start, one)}"
            yield told
            return
        start = one
    if len(wanted) != len(seen):
        yield f"weights: {len(seen)} steps, {len(wanted)} expected"


def _moves(start: Tensor, steps: Steps, least: float) -> Steps:
    """Return the steps that moved the weights."""
    found = [(0, start)]
    for epoch, weights in steps:
        if not torch.allclose(weights, found[-1][1], rtol=0, atol=least):
            found.append((epoch, weights))
    return found[1:]


def _shares(before: Tensor, after: Tensor) -> str:
    """Return which part of a step each sample has, of the weights before and after it."""
    targets = torch.tensor([models.target(number) for number in range(len(before))])
    parts = (after - before) / (2 * models.RATE * (targets - before))
    return str({number: round(float(one), 4) for number, one in enumerate(parts) if not abs(one) < 1e-9})


def _logged(where: str, wanted: dict[str, float], seen: dict[str, float]) -> Iterator[str]:
    for name, value in wanted.items():
        other = seen.get(name, math.nan)
        if not abs(value - other) <= LOGGED * max(1.0, abs(value)):
            yield f"{where}: {name} is {other:.6g}, not {value:.6g}"


def _seen(part: Part) -> str:
    batches: dict[tuple[int, int], list[str]] = {}
    for outcome in part.outcomes:
        for epoch, batch, numbers in outcome.seen:
            batches.setdefault((epoch, batch), []).append(str(numbers))
    return ", ".join("+".join(many) for many in batches.values())[:600]
