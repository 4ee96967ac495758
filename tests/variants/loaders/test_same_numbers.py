"""Each stage of ZeRO has the weights of one process; the other strategies, divisions and resumes: random programs."""

from __future__ import annotations

import pytest

from benchmarks.same_numbers.program import Program
from benchmarks.same_numbers.run import check
from tests.ranks.same_numbers.test_programs import DEFAULT, PROGRAMS, wrong

#: Samples; a step in parts, of which the last one is not complete; items.
HOW: tuple[dict[str, int | str], ...] = ({}, {"accumulate": 2}, {"loss": "items"})


@pytest.mark.parametrize("first", range(0, 20, 4))
def test_the_other_random_programs_come_to_the_numbers_of_one_process(first: int) -> None:
    others = [program for number, program in enumerate(PROGRAMS) if number not in DEFAULT]
    found = wrong(others[first : first + 4])
    assert not found, found


def test_each_stage_has_the_weights_of_one_process() -> None:
    found = wrong(
        [
            Program(ranks=2, samples=37, batch=4, order="shuffle", model="net", epochs=2, strategy=stage, **how)  # type: ignore[arg-type]
            for stage in ("zero1", "zero2", "zero3")
            for how in HOW
        ]
    )
    assert not found, found


def test_items_are_refused_while_gradients_accumulate() -> None:
    (found,) = check([Program(ranks=2, samples=8, strategy="zero3", loss="items", accumulate=2)])
    assert not found.verdict.differences and found.verdict.refused.startswith("DeepSpeed refuses num_items")
