"""Each stage of ZeRO has the weights of one process; the other strategies, divisions and resumes: random programs."""

from __future__ import annotations

from benchmarks.same_numbers.program import Program
from benchmarks.same_numbers.run import check
from tests.ranks.same_numbers.test_programs import wrong

#: Samples; a step in parts, of which the last one is not complete; items.
HOW: tuple[dict[str, int | str], ...] = ({}, {"accumulate": 2}, {"loss": "items"})


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
