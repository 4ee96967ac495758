"""Random programs of collectives, alike on all ranks but for one divergence; pure data, nothing runs here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["DIVERGENCES", "Divergence", "Program", "Step", "random_program"]

Kind = Literal[
    "skip", "other", "shape", "dtype", "root", "sleep", "poll", "kill", "raise", "stop", "early", "extra"
]
DIVERGENCES: tuple[Kind, ...] = (
    "skip",
    "other",
    "shape",
    "dtype",
    "root",
    "sleep",
    "poll",
    "kill",
    "raise",
    "stop",
    "early",
    "extra",
)
#: Bytes of one element.
DTYPES = {"float32": 4, "int32": 4, "float64": 8, "int64": 8, "uint8": 1, "float16": 2}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ASYNC = ("all_reduce", "all_gather_into_tensor", "broadcast", "all_to_all_single")
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
    *ROOTED,
    *("barrier", "all_gather_object"),
)
WITHOUT_TENSORS = ("barrier", "all_gather_object")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a program."""

    # one of :data:`COLLECTIVES`; ``message`` (a send and a receive); or a fault, such as ``kill``
    operation: str
    group: int = 0  # index of the group in the program; 0 is the default group
    dtype: str = "float32"
    shape: tuple[int, ...] = (4,)
    root: int | None = None  # the rank that sends to all or receives from all; the sender of a message
    receiver: int | None = None  # the receiver of a message
    # after how many further steps an asynchronous operation is waited for; 0: it is none
    waited_after: int = 0
    pause: float = 0.0  # seconds before it
    computes: bool = False  # whether the rank computes for that time instead of sleeping


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """What one rank does otherwise."""

    kind: Kind  # in which way
    rank: int  # the rank
    index: int  # the step of the common program at which it does
    step: Step | None = None  # what it does there instead or in addition; ``None``: nothing


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the ranks do."""

    seed: int  # the number it was made from
    world_size: int  # number of ranks
    groups: tuple[tuple[int, ...], ...]  # ranks of each group; the first is the default group
    # what all ranks have in common, with those of the groups and messages that a rank is not in
    steps: tuple[Step, ...]
    divergence: Divergence | None = None  # what one rank does otherwise, if there is one

    def takes_part(self, rank: int, step: Step) -> bool:
        """Return whether a rank has anything to do in a step."""
        if step.operation == "message":
            return rank in (step.root, step.receiver)
        return rank in self.groups[step.group]

    def steps_of(self, rank: int) -> list[Step]:
        """Return what a rank does, in order."""
        steps: list[Step] = []
        one = self.divergence
        for index, step in enumerate(self.steps):
            own = [step] if self.takes_part(rank, step) else []
            if one is not None and one.rank == rank and one.index == index:
                if one.kind == "early":
                    return steps
                own = [*([one.step] if one.step else []), *(own if one.kind == "extra" else [])]
            steps += own
        return steps


def random_program(seed: int, kind: Kind | None) -> Program:
    """Return the program that belongs to a number."""
    rng = random.Random(f"{seed} {kind}")
    world_size = rng.choice((2, 3, 3, 4, 4))
    groups = _groups(rng, world_size)
    steps = [_step(rng, groups) for _ in range(rng.randint(5, 25))]
    # As at the end of an epoch; without it nobody would ever wait for what came last.
    program = Program(
        seed=seed, world_size=world_size, groups=groups, steps=(*steps, Step(operation="barrier"))
    )
    return program if kind is None else _diverging(rng, program, kind)


def _groups(rng: random.Random, world_size: int) -> tuple[tuple[int, ...], ...]:
    world = tuple(range(world_size))
    found = {world: None}
    for _ in range(rng.randint(0, 2) if world_size > 2 else 0):
        found[tuple(sorted(rng.sample(world, rng.randint(2, world_size - 1))))] = None
    return tuple(found)


def _step(
    rng: random.Random, groups: Sequence[Sequence[int]], group: int | None = None, operation: str = ""
) -> Step:
    pause = {
        "pause": rng.uniform(0.0, 0.05) if rng.random() < 0.3 else 0.0,
        "computes": rng.random() < 0.5,
    }
    operation = operation or rng.choice((*COLLECTIVES, "message"))
    if operation == "message":
        sender, receiver = rng.sample(groups[0], 2)
        return Step(operation="message", root=sender, receiver=receiver, shape=(rng.randint(1, 9),), **pause)
    group = rng.randrange(len(groups)) if group is None else group
    first = rng.randint(1, 5) * len(groups[group])
    return Step(
        operation=operation,
        group=group,
        dtype="float32" if operation in WITHOUT_TENSORS else rng.choice(list(DTYPES)),
        shape=(first,) if operation in WITHOUT_TENSORS or rng.random() < 0.5 else (first, rng.randint(2, 6)),
        root=rng.choice(groups[group]) if operation in ROOTED else None,
        waited_after=rng.randint(1, 4) if operation in ASYNC and rng.random() < 0.3 else 0,
        **pause,
    )


def _diverging(rng: random.Random, program: Program, kind: Kind) -> Program:
    """Return the program with a divergence of one rank at one step, which is put in where there is no fit one."""
    # Without sends and receives: the guard does not see who waits in one.
    steps = [step for step in program.steps if step.operation != "message"]
    program = replace(program, steps=tuple(steps))
    rank = rng.randrange(program.world_size)
    fit = [index for index, step in enumerate(program.steps) if _fits(program, rank, step, kind)]
    if not fit:
        operation = "reduce" if kind == "root" else "all_reduce"
        step = _step(rng, program.groups, 0, operation)
        program, fit = replace(program, steps=(step, *program.steps)), [0]
    index = rng.choice(fit)
    if kind in ("other", "shape", "dtype", "root"):
        # The calls of asynchronous operations are told apart less well; that is not what is tested here.
        steps = list(program.steps)
        steps[index] = replace(steps[index], waited_after=0)
        program = replace(program, steps=tuple(steps))
    step = _otherwise(rng, program, program.steps[index], kind)
    return replace(program, divergence=Divergence(kind=kind, rank=rank, index=index, step=step))


def _fits(program: Program, rank: int, step: Step, kind: Kind) -> bool:
    if not program.takes_part(rank, step):
        return False
    if kind == "root":
        return step.operation in ROOTED
    if kind in ("shape", "dtype"):
        return step.operation not in WITHOUT_TENSORS
    return True


def _otherwise(rng: random.Random, program: Program, step: Step, kind: Kind) -> Step | None:
    if kind in ("skip", "early"):
        return None
    if kind in ("other", "extra"):
        choice = [name for name in COLLECTIVES if name != step.operation or kind == "extra"]
        made = _step(rng, program.groups, step.group, rng.choice(choice))
        return replace(made, waited_after=0)
    if kind == "shape":
        first, *others = step.shape
        larger = (first * 2, *others)
        return replace(step, shape=(first * others[0],) if others and rng.random() < 0.3 else larger)
    if kind == "dtype":
        return replace(step, dtype=rng.choice([name for name in DTYPES if name != step.dtype]))
    if kind == "root":
        return replace(step, root=rng.choice([one for one in program.groups[step.group] if one != step.root]))
    return Step(operation=kind)
