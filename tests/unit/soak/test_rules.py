"""Which run a seed of the soak stands for, and how what came of a run is told apart from what must."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers import ScriptOutcome
from tests.soak.outcome import Observed, differences
from tests.soak.plan import FAULTS, WITH_MPI, Plan, draw
from tests.soak.rules import expect


def test_a_seed_stands_for_one_run_and_every_fault_comes_once_in_a_cycle() -> None:
    assert draw(17) == draw(17)
    cycle = [draw(seed).fault for seed in range(3 * len(FAULTS), 4 * len(FAULTS))]
    assert sorted(cycle) == sorted(FAULTS)
    assert {draw(seed, stock=True).launch for seed in range(40)}.isdisjoint(WITH_MPI)


PLAN = Plan(0, "popen", 2, (), "raise", 1)
REPORT = (
    "lightning-lockstep: rank 1 of 2 (host h, process 1) failed\nValueError: boom in training_step\n\n"
    "rank 1 of 2 (host h, process 1) failed: ValueError: boom in training_step\n"
)
GOOD = Observed(
    ScriptOutcome(1, "", REPORT, 5.0, False, ()),
    {"0": "RankFailedError", "1": "ValueError"},
    frozenset(),
    True,
    2.0,
    {"epoch=0-step=4.ckpt": None},
    (),
)


def test_a_run_that_ends_as_it_must_differs_in_nothing() -> None:
    assert differences(expect(PLAN), GOOD) == []


@pytest.mark.parametrize(
    ("script", "seen", "message"),
    [
        ({"returncode": 0}, {}, "exit code 0, expected 1"),
        ({"timed_out": True}, {}, "it did not end"),
        ({"leftovers": ("7 sleeping python",)}, {}, "left running: 7 sleeping python"),
        ({"stderr": REPORT + "one more line\n"}, {}, "the last line is 'one more line'"),
        ({"stderr": "ValueError: boom in training_step\n" + REPORT}, {}, "begins 2 lines, expected 1"),
        ({"stderr": REPORT.replace("rank 1", "rank 0")}, {}, "not printed: 'rank 1 of 2"),
        (
            {},
            {"raised": {"1": "ValueError", "0": "RuntimeError"}},
            "0: RuntimeError, expected RankFailedError",
        ),
        ({}, {"done": frozenset("0")}, "0 came to the end of the program"),
        ({}, {"seconds": 999.0}, "it ended 999 s after the fault"),
        ({}, {"checkpoints": {"epoch=0-step=4.ckpt": "EOFError: "}}, "cannot be read: EOFError"),
        ({}, {"checkpoints": {}}, "no checkpoint"),
        ({}, {"files": ("/dev/shm/x",)}, "left behind: /dev/shm/x"),
        ({}, {"trouble": "it ended before"}, "the fault could not happen: it ended before"),
    ],
)
def test_a_run_that_ends_otherwise_is_told_apart(script: dict, seen: dict, message: str) -> None:  # type: ignore[type-arg]
    other = dataclasses.replace(GOOD, script=dataclasses.replace(GOOD.script, **script), **seen)
    found = differences(expect(PLAN), other)
    assert len(found) == 1 and message in found[0], found


def test_a_run_that_is_not_hurt_must_come_to_the_end_on_every_rank() -> None:
    found = differences(expect(dataclasses.replace(PLAN, fault="slow")), dataclasses.replace(GOOD, raised={}))
    assert found == [
        "exit code 1, expected 0",
        "0 did not come to the end of the program",
        "1 did not come to the end of the program",
    ]
