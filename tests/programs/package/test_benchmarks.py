"""The benchmark engine: order, pairing and verdicts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    """The benchmarks are not installed: this one is imported from its file."""
    spec = importlib.util.spec_from_file_location("benchmarks_engine", ROOT / "benchmarks" / "engine.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(
        spec
    )  # where dataclasses look for themselves
    spec.loader.exec_module(module)
    return module


def test_variants_take_turns_in_a_rotating_order(engine: ModuleType) -> None:
    order: list[str] = []

    def variant(name: str) -> float:
        order.append(name)
        return float(len(order))

    names = ("a", "b", "c")
    samples = engine.interleave({n: lambda n=n: variant(n) for n in names}, rounds=3, warmup=1)  # type: ignore[misc]
    assert "".join(order[:3]) == "cab", "the warm-up round"
    assert "".join(order[3:]) == "abc" + "bca" + "cab"
    assert samples == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_ratios_are_taken_within_a_round(engine: ModuleType) -> None:
    """A machine that gets slower by the round does not change the ratio."""
    table = engine.Comparison("t", {"peer": [1, 2, 4, 8, 16], "ours": [2, 4, 8, 16, 32]}, peer="peer")
    spread = table.against_peer("ours")
    assert (spread.low, spread.median, spread.high) == (2, 2, 2)


@pytest.mark.parametrize(
    ("rounds", "name"), [(1, "one round"), (2, "range of 2"), (3, "range of 3"), (4, "middle half")]
)
def test_a_middle_half_takes_four_rounds(rounds: int, name: str, engine: ModuleType) -> None:
    table = engine.Comparison("t", {"peer": [1.0] * rounds, "ours": [2.0] * rounds}, peer="peer")
    assert table.header()[3] == name


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([0.9, 0.9, 0.9, 0.9], "reached"),
        ([0.9, 0.9, 1.1, 1.2], "reached"),
        ([0.9, 1.1, 1.1, 1.1], "missed"),
        ([0.8, 0.9, 1.2, 1.2], "reached within noise"),
        ([1.1, 1.2, 1.3, 1.4], "missed"),
    ],
)
def test_the_verdict(ours: list[float], verdict: str, engine: ModuleType) -> None:
    table = engine.Comparison("t", {"peer": [1.0] * 4, "ours": ours}, peer="peer", at_most={"ours": 1.0})
    assert table.rows()[1][-2:] == ["<= 1", verdict]


def test_a_difference_is_in_the_unit_shown(engine: ModuleType) -> None:
    table = engine.Comparison(
        "t",
        {"peer": [0.001] * 3, "ours": [0.0012, 0.00105, 0.0011]},
        peer="peer",
        by="difference",
        at_most={"ours": 0.1},
    )
    assert table.rows()[1] == ["ours", "1.100", "0.100", "0.050 to 0.200", "<= 0.1", "reached within noise"]


def test_every_topic_is_found_and_says_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for path in (ROOT / "benchmarks").glob("bench_*.py"):
        topic = path.stem.removeprefix("bench_")
        assert any(line.split()[:1] == [topic] and len(line.split()) > 3 for line in done.stdout.splitlines())
