"""Random programs of collectives: the right error naming the right rank, never a hang, never a false alarm.

Here are a few without divergence.

``python -m tests.common.distributed.guard.random_programs`` runs as many as one likes.
"""

from __future__ import annotations

import pytest

from tests.common.distributed.guard.program_expectation import Guard, expected
from tests.common.distributed.guard.program_model import (
    COLLECTIVES,
    DIVERGENCES,
    Divergence,
    Kind,
    Program,
    Step,
    random_program,
)
from tests.common.distributed.guard.random_programs import MODES, check, launches


@pytest.mark.parametrize("guard", MODES)
def test_programs_without_divergence_raise_nothing(guard: Guard) -> None:
    results = [result for programs in launches(range(4), None) for result in check(programs, guard)]
    assert len(results) == 4
    assert [result for result in results if result.faults] == []


@pytest.mark.parametrize(
    ("guard", "kind", "seed"),
    [
        pytest.param("watch", "early", 12, id="the rank that collects answers leaves before it has any"),
        pytest.param("verify", "early", 1, id="the root of a call belongs to a call of another group"),
    ],
)
def test_programs_that_went_wrong_once(guard: Guard, kind: Kind, seed: int) -> None:
    (result,) = check([random_program(seed, kind)], guard)
    assert result.faults == []


# -- what is expected, without processes ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, *DIVERGENCES])
def test_a_number_always_makes_the_same_program(kind: str) -> None:
    assert random_program(7, kind) == random_program(7, kind) != random_program(8, kind)


def test_all_ranks_do_the_same_but_for_the_divergence() -> None:
    for kind in DIVERGENCES:
        for seed in range(20):
            program = random_program(seed, kind)
            usual = Program(
                seed=seed, world_size=program.world_size, groups=program.groups, steps=program.steps
            )
            differ = [r for r in range(program.world_size) if program.steps_of(r) != usual.steps_of(r)]
            assert program.divergence is not None and differ == [program.divergence.rank]
            assert expected(usual).ends == ("completes",)


def test_every_operation_and_divergence_comes_up() -> None:
    programs = [random_program(seed, None) for seed in range(60)]
    assert {step.operation for program in programs for step in program.steps} == {*COLLECTIVES, "message"}
    assert {program.world_size for program in programs} == {2, 3, 4}
    assert any(len(program.groups) > 1 for program in programs)


def diverging(step: Step, instead: Step | None, *, rank: int = 1, world_size: int = 3) -> Program:
    """Return a program of two operations, of which one rank calls the first differently."""
    return Program(
        seed=0,
        world_size=world_size,
        groups=(tuple(range(world_size)),),
        steps=(step, Step(operation="barrier")),
        divergence=Divergence(kind="other", rank=rank, index=0, step=instead),
    )


@pytest.mark.parametrize(
    ("step", "instead", "ends"),
    [
        (Step(operation="all_reduce"), Step(operation="all_reduce", dtype="int32"), ("completes",)),
        (Step(operation="all_reduce"), Step(operation="reduce_scatter_tensor"), ("completes",)),
        (Step(operation="all_gather"), Step(operation="all_gather_into_tensor"), ("completes",)),
        (Step(operation="all_reduce"), Step(operation="all_reduce", dtype="int64"), ("mismatch",)),
        (Step(operation="all_reduce"), Step(operation="all_reduce", shape=(2, 2)), ("completes",)),
        (Step(operation="all_reduce"), Step(operation="all_reduce", shape=(8,)), ("mismatch",)),
        (Step(operation="all_reduce"), None, ("mismatch",)),
        (Step(operation="broadcast", root=0), Step(operation="broadcast", root=2), ("mismatch",)),
        (Step(operation="broadcast", root=0), Step(operation="broadcast", root=0, shape=(2,)), ("mismatch",)),
        (
            Step(operation="broadcast", root=0),
            Step(operation="broadcast", root=0, shape=(9,)),
            ("completes", "mismatch"),
        ),
        (Step(operation="barrier"), None, ("mismatch", "stall", "failed")),
        (Step(operation="message", root=1, receiver=0), None, ("mismatch", "stall")),
    ],
)
def test_what_gloo_completes_and_what_it_does_not(
    step: Step, instead: Step | None, ends: tuple[str, ...]
) -> None:
    found = expected(diverging(step, instead))
    assert (found.ends, found.rank) == (ends, 1)


@pytest.mark.parametrize(
    ("step", "instead", "ends"),
    [
        (Step(operation="all_reduce"), Step(operation="all_reduce", dtype="int32"), ("mismatch",)),
        (Step(operation="all_reduce"), Step(operation="reduce_scatter_tensor"), ("mismatch",)),
        (Step(operation="all_reduce"), Step(operation="all_reduce", shape=(2, 2)), ("mismatch",)),
        (Step(operation="all_reduce", waited_after=1), None, ("mismatch",)),
        (
            Step(operation="all_to_all_single", shape=(6,)),
            Step(operation="all_to_all_single", shape=(3, 2)),
            None,
        ),
        (Step(operation="scatter", root=0), Step(operation="scatter", root=0, shape=(8,)), ("mismatch",)),
        (Step(operation="message", root=1, receiver=0), None, ("mismatch", "stall")),
    ],
)
def test_what_is_compared_before_it_runs(
    step: Step, instead: Step | None, ends: tuple[str, ...] | None
) -> None:
    assert expected(diverging(step, instead), "verify").ends == (ends or ("completes",))
