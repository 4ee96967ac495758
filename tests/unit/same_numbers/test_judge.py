"""The judge of random programs finds each fault that is planted in what came of one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.same_numbers.fit import Outcome
from tests.same_numbers.judge import Part, PlainLoop, judge
from tests.same_numbers.program import Program, parse

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


def padded(outcome: Outcome) -> None:
    """The last step of an epoch has its one sample and, from another rank, sample 0."""
    before, after = outcome.weights[1][1], outcome.weights[2][1]
    after[4] = before[4] + (after[4] - before[4]) / 2
    after[0] = before[0] + 0.1 * (1.0 - before[0])


def logged(outcome: Outcome) -> None:
    outcome.epochs[1][1]["train_sum"] += 0.01


def never_validated(outcome: Outcome) -> None:
    del outcome.epochs[0][1]["val_sum"]


def at_step(outcome: Outcome) -> None:
    outcome.steps[2][2]["train_step_sum_sync"] *= 2


def in_test(outcome: Outcome) -> None:
    outcome.test["test_sum"] = float("nan")


def epoch_less(outcome: Outcome) -> None:
    del outcome.epochs[1]


def raised(outcome: Outcome) -> None:
    outcome.error = "ValueError: no"


def refused(outcome: Outcome) -> None:
    outcome.error, outcome.refused = "ConfigurationError: no", True
    outcome.weights.clear()


FAULTS: dict[Callable[[Outcome], None], str] = {
    moved: "weights: step 1 of epoch 0 is off by 1e-11",
    lost: "weights: 5 steps, 6 expected",
    padded: "the shares of the samples are {0: 0.5, 4: 0.5}, not {4: 1.0}",
    logged: "values: epoch 1: train_sum is",
    never_validated: "values: epoch 0: val_sum is nan",
    at_step: "step values: epoch 0, batch 2: train_step_sum_sync is",
    in_test: "values: test: test_sum is nan",
    epoch_less: "values: epochs [0], expected [0, 1]",
    raised: "error: whole, rank [1]: ValueError: no",
    refused: "error: whole, rank [1]: ConfigurationError: no",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_one_rank_is_found(fault: Callable[[Outcome], None]) -> None:
    outcomes = right(PROGRAM)
    assert verdict(PROGRAM, outcomes) == []
    fault(outcomes[1])
    found = verdict(PROGRAM, outcomes)
    assert FAULTS[fault] in found[0], found


def test_a_refusal_is_right_if_a_limit_says_so_and_all_ranks_refuse() -> None:
    limited = dataclasses.replace(PROGRAM, effective=4, order="lazy", values=())
    outcomes = [Outcome(error="ConfigurationError: no", refused=True) for _ in range(2)]
    assert judge(limited, [Part("whole", outcomes)], None).refused.startswith("EffectiveBatchSize takes one")
    assert verdict(PROGRAM, outcomes) == ["refused: whole, rank [0, 1]: ConfigurationError: no"]
    assert verdict(limited, [outcomes[0], Outcome()]) == ["error: whole, rank [0]: ConfigurationError: no"]


@pytest.mark.parametrize(
    "batches", [[[0, 1], [2, 2]], [[0, 1], [2]], [[0, 1], [2, 4]], [[0, 1], [2, 3], [3]]], ids=str
)
def test_an_order_that_is_no_permutation_is_found(batches: list[list[int]]) -> None:
    program = Program(samples=4, batch=2, order="shuffle")
    assert judge(program, [], [batches]).differences == [f"order: epoch 0 on one rank: {batches}"]
    assert judge(program, [], [[[3, 1], [0, 2]]]).differences == []


def test_the_plain_loop_weighs_each_sample_by_its_items_and_divides_by_what_is_none_too() -> None:
    cases = {
        "ranks=2 samples=3 batch=2": {0: 1 / 3, 1: 1 / 3, 2: 1 / 3},
        'ranks=2 samples=4 batch=2 loss="items"': {0: 1 / 6, 1: 2 / 6, 2: 3 / 6},
        'ranks=2 samples=4 batch=2 loss="items" corrupt=(2,)': {0: 1 / 3, 1: 2 / 3},
        'ranks=2 samples=4 accumulate=2 loss="none"': {0: 1 / 4, 1: 1 / 4},
        'ranks=3 samples=3 loss="skip"': {0: 1 / 3, 2: 1 / 3},
        'ranks=2 samples=4 batch=3 order="varied"': {0: 1 / 3, 1: 1 / 3, 2: 1 / 3},
    }
    for text, shares in cases.items():
        weights = PlainLoop(parse(text), None).expected.steps[0][1]
        expected = torch.zeros(60, dtype=torch.float64)
        for sample, share in shares.items():
            expected[sample] = 0.2 * share * (1 + sample / 10)
        assert torch.allclose(weights, expected, rtol=0, atol=1e-15), text
