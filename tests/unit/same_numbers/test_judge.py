"""The judge of random programs finds each fault that is planted in what came of one."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.same_numbers.fit import Outcome
from tests.same_numbers.judge import Part, PlainLoop, judge
from tests.same_numbers.program import Program

PROGRAM = Program(
    ranks=2, samples=5, batch=1, epochs=2, values=("sum", "step_sum_sync"), validation=3, test=4
)


def right(program: Program, ranks: int = 2) -> list[Outcome]:
    """Return what each rank sees of a program if all is right."""
    wanted = PlainLoop(program, None).expected
    steps = [(epoch, micro, values) for (epoch, micro), values in wanted.at_step.items()]
    one = Outcome(weights=wanted.steps, epochs=list(wanted.epochs.items()), steps=steps, test=wanted.test)
    return [copy.deepcopy(one) for _ in range(ranks)]


def verdict(program: Program, outcomes: list[Outcome]) -> list[str]:
    return judge(program, [Part("whole", outcomes)], None).differences


def moved(outcome: Outcome) -> None:
    outcome.weights[1][1][0] += 1e-11


def lost(outcome: Outcome) -> None:
    del outcome.weights[-1]


def logged(outcome: Outcome) -> None:
    outcome.epochs[1][1]["train_sum"] += 0.01


def in_test(outcome: Outcome) -> None:
    outcome.test["test_sum"] = float("nan")


def raised(outcome: Outcome) -> None:
    outcome.error = "ValueError: no"


FAULTS: dict[Callable[[Outcome], None], str] = {
    moved: "weights: step 1 of epoch 0 is off by 1e-11",
    lost: "weights: 5 steps, 6 expected",
    logged: "values: epoch 1: train_sum is",
    in_test: "values: test: test_sum is nan",
    raised: "error: whole, rank [1]: ValueError: no",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_one_rank_is_found(fault: Callable[[Outcome], None]) -> None:
    outcomes = right(PROGRAM)
    assert verdict(PROGRAM, outcomes) == []
    fault(outcomes[1])
    found = verdict(PROGRAM, outcomes)
    assert FAULTS[fault] in found[0], found
