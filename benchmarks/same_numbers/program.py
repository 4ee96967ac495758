"""Which training programs there are, and which one a seed stands for."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

STRATEGIES = ("ddp", "fsdp", "mpi", "zero1", "zero2")
#: Lightning's own on one process, by which the judge is judged.
STOCK = "auto"
#: Orders of samples, of which ranks take parts of a batch, and orders of whole batches, of which they take turns.
BY_SAMPLE = {
    "none": "no sampler, shuffle=False",
    "shuffle": "shuffle=True",
    "weighted": "WeightedRandomSampler, with more draws than samples",
    "subset": "SubsetRandomSampler of every second sample",
    "part": "a Subset of the data without every third sample",
    "num_samples": "RandomSampler(replacement=True, num_samples=)",
    "fewer": "RandomSampler(num_samples=) of fewer than there are",
    "own": "a sampler of the program's own, which repeats a sample",
    "by_length": "a sampler of the program's own that sorts by length",
    "counter": "a sampler of the program's own that gives another order each time it is asked",
    "stream": 'an IterableDataset under iterable_datasets="shard"',
}
BY_BATCH = {
    "batches": "torch's BatchSampler over a sampler of the program's own",
    "random_batches": "torch's BatchSampler over a RandomSampler",
    "cached": "a BatchSampler that makes its batches when it is made",
    "counted": "a BatchSampler that counts its batches when it is made",
    "lazy": "a batch sampler that is no BatchSampler",
    "varied": "a batch sampler that is no BatchSampler, with batches of several sizes",
    "nolen": "a BatchSampler without a length",
    "items": "batch_size=None, each item a batch",
}
#: Their order is the package's choice, so it is taken from a run on one rank.
DRAWN = ("shuffle", "weighted", "subset", "num_samples", "fewer", "random_batches")
LOSSES = {
    "mean": "the mean over the batch",
    "items": "the mean over items, with num_items; some samples have none",
    "none": "every third step returns None on all ranks",
    "skip": "a step returns None if its one sample is one of these",
    "manual": "manual optimization",
}
VALUES = ("mean", "sum", "max", "min", "loss", "mean_sync", "sum_sync", "max_sync", "metric", "list")
STEP_VALUES = ("step_mean", "step_mean_sync", "step_sum_sync", "step_max_sync")


@dataclass(frozen=True)
class Program:
    """One training program; the values here are the simplest ones."""

    ranks: int = 1
    samples: int = 1
    batch: int = 1  # of a rank, if ranks take parts of a batch; else of all of the program's own batches
    strategy: str = "ddp"
    order: str = "none"
    drop_last: bool = False
    second: int = 0  # samples of a second training loader
    mode: str = "max_size"  # how two training loaders are taken together
    workers: int = 0
    persistent: bool = False
    collate: str = "tensors"
    corrupt: tuple[int, ...] = ()  # samples of which the data set gives None, and collate_fn leaves them out
    model: str = "shares"  # each sample moves a weight of its own; or net, where all move all
    real: bool = False  # augmentation, batch norm and dropout, as on one rank
    optimizer: str = "sgd"
    schedule: bool = False  # a learning rate that falls over trainer.estimated_stepping_batches
    loss: str = "mean"
    accumulate: int = 1
    effective: int = 0  # EffectiveBatchSize(global_batch_size=)
    clip: str = ""
    epochs: int = 1
    values: tuple[str, ...] = ()  # what is logged in training and in evaluation
    batch_size: bool = False  # self.log is given batch_size=
    validation: int = 0  # samples
    sanity: int = 0  # num_sanity_val_steps
    test: int = 0  # samples
    eval_order: str = "none"
    eval_batch: int = 1
    eval_loaders: int = 1
    stop: int = 0  # the optimizer step after which the fit ends
    resume_ranks: int = 0  # on which it goes on
    seed: int = 0

    def __str__(self) -> str:
        changed = ((name, value) for name, value in vars(self).items() if value != getattr(Program, name))
        return " ".join(f"{name}={value!r}".replace(" ", "").replace("'", '"') for name, value in changed)

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in a micro-batch, if ranks take parts of a batch."""
        return self.batch * self.ranks

    @property
    def given(self) -> int:
        """Samples that the training loader gives in an epoch."""
        more = {"subset": -(self.samples // 2), "part": -((self.samples + 2) // 3), "fewer": -2}
        count = self.samples + (more | {"weighted": 2, "num_samples": 3, "own": 1}).get(self.order, 0)
        return count // self.whole * self.whole if self.drop_last else count

    @property
    def whole(self) -> int:
        """Samples of which drop_last drops what is left: a batch of its own, or else an optimizer step."""
        # Samples are not dropped by micro-batches, so that it does not matter into how many a step is divided.
        if self.order in BY_BATCH:
            return self.batch
        return self.effective or self.global_batch * self.accumulate

    def on(self, ranks: int) -> Program:
        """Return the same program on other ranks: with the same global batch, or the same own batches."""
        batch = self.global_batch // ranks if self.order in BY_SAMPLE else self.batch
        return dataclasses.replace(self, ranks=ranks, batch=batch)


def program_of(text: str) -> Program:
    """Return the program of a line that ``str`` has made."""
    words = (word.partition("=") for word in text.split())
    return Program(**{name: ast.literal_eval(value) for name, _, value in words})


#: What each field is drawn from; a value that stands there twice is drawn twice as often.
_CHOICES: dict[str, Sequence[Any]] = {
    "ranks": (1, 2, 2, 3, 3, 4),
    "samples": range(1, 41),
    "batch": (1, 1, 2, 3, 4, 5, 6),
    "order": (*BY_SAMPLE, *BY_BATCH, "none", "shuffle"),
    "drop_last": (False,) * 4 + (True,),
    "mode": ("max_size", "max_size_cycle", "min_size"),
    "workers": (*[0] * 18, 1, 2),
    "persistent": (False, True),
    "collate": ("tensors", "tensors", "dict", "list"),
    "model": ("shares", "shares", "net"),
    "optimizer": ("sgd", "sgd", "momentum", "adam"),
    "schedule": (False,) * 6 + (True,),
    "loss": (*["mean"] * 3, *LOSSES),
    "accumulate": (1, 1, 1, 2, 3),
    "clip": ("", "", "", "norm", "value"),
    "epochs": (1, 2, 3),
    "batch_size": (False, False, True),
    "validation": (*[0] * 40, *range(1, 21)),
    "sanity": (0, 0, 2),
    "test": (*[0] * 40, *range(1, 21)),
    "eval_order": (*["none"] * 8, *(one for one in BY_BATCH if one not in DRAWN), "stream"),
    "eval_batch": (1, 2, 3, 4),
    "eval_loaders": (1, 1, 1, 1, 2),
    "resume_ranks": (1, 2, 3, 4),
    "seed": range(100),
}
#: What makes most other choices impossible is chosen first, in place of what stands above.
_THEMES: tuple[dict[str, Sequence[Any]], ...] = (
    *[{}] * 6,
    {"stop": (1, 2, 3, 5), "samples": range(12, 41)},
    {"effective": (4, 7, 12)},
    {"second": range(1, 21), "order": ("none",)},
    {"corrupt": ((0,), (1, 2, 7), (3, 4, 5, 11, 30)), "loss": ("mean", "items")},
    {"loss": ("skip", "manual")},
    *[{"real": (True,), "model": ("net",), "batch": (2, 3, 4, 5), "order": tuple(BY_SAMPLE)}] * 2,
)


def draw(seed: int, strategies: Sequence[str] = STRATEGIES) -> Program:
    """Return the program that a seed stands for."""
    draws = random.Random(f"same numbers {seed}")
    for attempt in itertools.count():
        if attempt % 200 == 0:  # a theme may be impossible with these strategies
            choices = _CHOICES | draws.choice(_THEMES)
        drawn = {name: draws.choice(of_it) for name, of_it in choices.items()}
        drawn["strategy"] = draws.choice(list(strategies)) if draws.random() < 0.4 else strategies[0]
        drawn["values"] = (
            *draws.sample(VALUES, draws.choice((0, 2, 4))),
            *draws.sample(STEP_VALUES, draws.choice((0, 0, 2))),
        )
        program = _without_idle_fields(Program(**drawn))
        if impossible(program) is None:
            return program
    raise AssertionError("a program is possible with any strategy")


def _without_idle_fields(program: Program) -> Program:
    """Return the program without what has no effect."""
    idle: list[str] = []
    idle += ["mode"] * (not program.second) + ["persistent"] * (not program.workers)
    idle += ["resume_ranks"] * (not program.stop) + ["sanity"] * (not program.validation)
    if not program.validation and not program.test:
        idle += ["eval_order", "eval_batch", "eval_loaders"]
    usual = {name: getattr(Program, name) for name in idle}
    return dataclasses.replace(program, **({"resume_ranks": program.resume_ranks or 1} | usual))


def impossible(program: Program) -> str | None:
    """Return why a program would say nothing about the package, if it would."""
    p, values = program, program.values
    alone = p.order in BY_SAMPLE and p.batch == 1 and not p.effective and not p.second
    has_none = p.loss in ("none", "skip") or p.corrupt
    divided = p.accumulate > 1 or p.effective
    rules = {
        "manual optimization has none of this": p.loss == "manual" and (divided or p.clip or p.schedule or p.corrupt),
        "EffectiveBatchSize sets the accumulation": p.effective and p.accumulate > 1,
        "whether a batch is None may not depend on how it is divided": (p.loss == "skip" and not alone)
        or (p.corrupt and p.loss != "items" and not (alone and p.loss == "mean")),
        "micro-batches have no fixed number under EffectiveBatchSize": p.loss == "none" and p.effective,
        "values at a step are those of full micro-batches": any(one.startswith("step") for one in values)
        and (has_none or p.effective or p.second),
        "a step without a loss may count as a step, or not": (p.stop or p.schedule) and (has_none or p.loss == "items"),
        "where a fit stops, its schedule ends": p.stop and p.schedule,
        "the global batch is not the same on those ranks": p.stop
        and p.order in BY_SAMPLE
        and p.global_batch % p.resume_ranks,
        "no fit goes on after its last step": p.stop
        and 2 * p.stop * p.whole * p.ranks * (p.accumulate if p.order in BY_BATCH else 1) >= p.epochs * p.given,
        "numbers of a sample, of a model with batch norm": p.real
        and (p.order not in BY_SAMPLE or p.order == "stream" or p.model != "net" or p.second or p.effective),
        "a rank without a loss is refused beside batch norm of the batch": p.real and has_none,
        "a bias in front of a batch norm has a gradient of rounding only": p.real and p.strategy[:4] == "zero",
        "the loss of an evaluation is left to other programs": p.real and "loss" in values,
        # Of two, each normalized value is 1 or -1, and the gradients in front of it are rounding only.
        "batch norm of one or two samples": p.real and (p.global_batch <= 2 or p.given % p.global_batch in (1, 2)),
        "two loaders are plain ones": p.second
        and (p.order != "none" or p.corrupt or p.collate == "list" or p.drop_last or p.stop or p.effective),
        "a loader of nothing": p.given < 1,
        "the data set makes the batch": (p.collate == "list" or p.corrupt) and "items" in (p.order, p.eval_order),
        "nothing is dropped": p.drop_last and p.order in ("items", "varied"),
        "a schedule needs a number of steps": p.schedule and p.order in ("stream", "nolen"),
        "Lightning alone: one process, means of means, and resumes that are not exact": p.strategy == STOCK
        and (p.ranks > 1 or p.real or p.loss not in ("mean", "manual") or p.corrupt or divided or p.stop),
        "Lightning alone: each worker reads the stream": p.strategy == STOCK
        and p.workers
        and "stream" in (p.order, p.eval_order),
    }
    return next((rule for rule, holds in rules.items() if holds), None)


@dataclass(frozen=True)
class Limit:
    """What is refused, with the sentence that users get."""

    sentence: str
    holds: Callable[[Program], object]
    late: bool = False  # whether the error comes when it happens, not before the first step


#: The programs that may end in one clear error of all ranks.
REFUSALS = (
    Limit(
        "EffectiveBatchSize takes one DataLoader with a batch size, whose data has a length.",
        lambda p: p.effective and (p.order in BY_BATCH or p.order == "stream" or p.second),
    ),
    Limit(
        "DeepSpeed refuses num_items, and items that are batches, while gradients accumulate.",
        lambda p: p.strategy[:4] == "zero" and "items" in (p.loss, p.order) and (p.accumulate > 1 or p.effective),
    ),
    Limit(
        "FSDP and DeepSpeed refuse a training_step that returns None, and a batch that is None.",
        lambda p: (p.strategy == "fsdp" or p.strategy[:4] == "zero") and (p.loss in ("none", "skip") or p.corrupt),
        late=True,
    ),
    Limit(
        "DeepSpeed makes no step in which no rank has an item.",
        lambda p: p.strategy[:4] == "zero" and p.loss == "items",
        late=True,
    ),
    Limit(
        "Loaders that are taken together need a sample of each on every rank.",
        lambda p: p.second and p.ranks > 1,
    ),
    Limit(
        "FSDP and DeepSpeed do not clip gradients by value.",
        lambda p: (p.strategy == "fsdp" or p.strategy[:4] == "zero") and p.clip == "value",
    ),
)


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs that are simpler in one thing, the most telling first."""
    numbers = ("ranks", "batch", "samples", "stop", "resume_ranks")
    for name in (*(one for one in vars(program) if one not in numbers), *numbers):
        value, simple = getattr(program, name), getattr(Program, name)
        options = [simple]
        if isinstance(value, tuple):
            options += [tuple(v for v in value if v != one) for one in value]
        elif type(value) is int:
            options += sorted({n for n in (simple + 1, (simple + value) // 2, value - 1) if simple < n < value})
        made = (_without_idle_fields(dataclasses.replace(program, **{name: option})) for option in options)
        yield from (one for one in made if one != program)
