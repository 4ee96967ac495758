"""Random programs of collectives: the right error naming the right rank, never a hang, never a false alarm.

Here are a few without divergence.

``python -m tests.common.distributed.guard.random_programs`` runs as many as one likes.
"""

from __future__ import annotations

import pytest

from tests.common.distributed.guard.program_expectation import Guard, expected
from tests.common.distributed.guard.program_model import DIVERGENCES, Program, random_program
from tests.common.distributed.guard.random_programs import MODES, check, launches


@pytest.mark.parametrize("guard", MODES)
def test_programs_without_divergence_raise_nothing(guard: Guard) -> None:
    results = [result for programs in launches(range(4), None) for result in check(programs, guard)]
    assert len(results) == 4
    assert [result for result in results if result.faults] == []


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
