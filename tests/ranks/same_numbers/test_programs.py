"""Random training programs reach the numbers of a plain loop on one process; scripts/same_numbers runs more."""

from __future__ import annotations

import pytest

from benchmarks.same_numbers.program import STOCK, Program, draw
from benchmarks.same_numbers.run import check

#: Forty programs, by their number of ranks; those that start DeepSpeed or mpirun are left to the script. Those that
#: are not of `DEFAULT` run in tests/variants/loaders/test_same_numbers.py.
PROGRAMS = sorted((draw(seed, ("ddp", "fsdp")) for seed in range(7000, 7040)), key=lambda one: one.ranks)
DEFAULT = range(0, 40, 2)
#: Some that the script has found wrong, and what few of those forty have.
NAMED = (
    # A fit of four ranks goes on with three at the very sample, and a fit of one with two.
    Program(ranks=4, samples=37, batch=3, order="shuffle", model="net", epochs=3, stop=1, resume_ranks=3),
    Program(samples=31, batch=4, order="weighted", accumulate=2, epochs=2, stop=2, resume_ranks=2),
    # A batch that is None, without items.
    Program(ranks=3, samples=6, corrupt=(1,)),
    # Ranks whose only batch is None log no metric object, and its sync waits for all.
    Program(ranks=3, samples=3, corrupt=(1, 2), epochs=2, values=("metric", "list")),
    # A rate that falls over the number of steps, which EffectiveBatchSize changes.
    Program(ranks=3, samples=24, batch=4, schedule=True, effective=6, epochs=3),
    # A batch that is None ends the micro-batches of an optimizer step.
    Program(samples=6, order="random_batches", corrupt=(0,), loss="items", accumulate=3, epochs=2),
    # A rank whose samples have no item, while its batch norm is that of all ranks.
    Program(ranks=2, samples=14, model="net", real=True, loss="items"),
    # A global batch of items that is kept, in micro-batches that three ranks cannot divide evenly.
    Program(ranks=3, samples=37, batch=2, order="shuffle", model="net", loss="items", effective=16, epochs=2),
    # Micro-batches that are counted, one of them without a loss; and a step in which no rank has a loss.
    Program(samples=2, order="items", loss="none", accumulate=2),
    Program(ranks=2, samples=4, order="items", loss="none", optimizer="momentum"),
    # A schedule that asks for the number of steps, which dividing the batches changes, with an engine.
    Program(samples=2, batch=2, strategy="zero2", schedule=True, effective=1),
)


def wrong(programs: list[Program]) -> str:
    """Return the programs that are wrong, with what is."""
    results = [one for one in check(programs) if one.verdict.differences]
    return "\n\n".join("\n".join([str(one.program), *one.verdict.differences]) for one in results)


@pytest.mark.parametrize("first", range(0, 20, 4))
def test_programs_come_to_the_numbers_of_one_process(first: int) -> None:
    found = wrong([PROGRAMS[number] for number in DEFAULT[first : first + 4]])
    assert not found, found


def test_programs_that_are_named() -> None:
    found = wrong(list(NAMED))
    assert not found, found


def test_lightning_alone_comes_to_the_numbers_of_the_plain_loop() -> None:
    """What judges the others is right of a program that has nothing to do with this package."""
    found = wrong([draw(seed, (STOCK,)) for seed in range(12)])
    assert not found, found
