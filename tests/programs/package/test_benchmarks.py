"""The benchmark engine: order, pairing, verdicts, and the pages it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", autouse=True)
def benchmarks_importable() -> None:
    """The benchmarks are not installed: import them from the repository without touching sys.path."""
    import importlib.util

    for name in (
        "benchmarks",
        "benchmarks.engine",
        "benchmarks.machine",
        "benchmarks.against",
        "benchmarks.__main__",
    ):
        path = ROOT / "benchmarks" / ("__init__.py" if name == "benchmarks" else f"{name.split('.')[1]}.py")
        spec = importlib.util.spec_from_file_location(
            name, path, submodule_search_locations=[str(path.parent)] if name == "benchmarks" else None
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def test_variants_take_turns_in_a_rotating_order() -> None:
    from benchmarks.engine import interleave

    order: list[str] = []

    def variant(name: str) -> float:
        order.append(name)
        return float(len(order))

    names = ("a", "b", "c")
    samples = interleave({n: lambda n=n: variant(n) for n in names}, rounds=3, warmup=1)  # type: ignore[misc]
    assert "".join(order[:3]) == "cab", "the warm-up round"
    assert "".join(order[3:]) == "abc" + "bca" + "cab"
    assert samples == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that gets slower by the round does not change the ratio."""
    from benchmarks.engine import Comparison

    table = Comparison("t", {"peer": [1, 2, 4, 8, 16], "ours": [2, 4, 8, 16, 32]}, peer="peer")
    spread = table.against_peer("ours")
    assert (spread.low, spread.median, spread.high) == (2, 2, 2)


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
def test_the_verdict(ours: list[float], verdict: str) -> None:
    from benchmarks.engine import Comparison

    table = Comparison("t", {"peer": [1.0] * 4, "ours": ours}, peer="peer", at_most={"ours": 1.0})
    assert table.rows()[1][-2:] == ["<= 1", verdict]


def test_a_difference_is_in_the_unit_shown() -> None:
    from benchmarks.engine import Comparison

    table = Comparison(
        "t",
        {"peer": [0.001] * 3, "ours": [0.0012, 0.00105, 0.0011]},
        peer="peer",
        by="difference",
        at_most={"ours": 0.1},
    )
    assert table.rows()[1] == ["ours", "1.100", "0.100", "0.050 to 0.200", "<= 0.1", "reached within noise"]


def test_unpaired_samples_and_unknown_names_are_refused() -> None:
    from benchmarks.engine import Comparison

    with pytest.raises(ValueError, match="paired rounds"):
        Comparison("t", {"peer": [1.0], "ours": [1.0, 2.0]}, peer="peer")
    with pytest.raises(ValueError, match=r"\['pear'\] not among"):
        Comparison("t", {"peer": [1.0]}, peer="pear")


def test_the_page_holds_machine_tables_and_notes() -> None:
    from benchmarks.__main__ import markdown
    from benchmarks.engine import Report, Table

    page = markdown(Report("T", [Table("x", ["a", "b"], [["1", "2"]])], ["mind"]), {"cpu": "fast"}, "cmd")
    assert (
        page
        == "# T\n\nMade by `cmd`.\n\n- cpu: fast\n\n## x\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n- mind\n"
    )


def test_every_topic_is_found_and_says_what_it_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    for path in (ROOT / "benchmarks").glob("bench_*.py"):
        topic = path.stem.removeprefix("bench_")
        assert any(line.split()[:1] == [topic] and len(line.split()) > 3 for line in done.stdout.splitlines())


def test_an_unknown_topic_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nothing"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


FAKE_TOPIC = """
from benchmarks.engine import Comparison, Report

def run(quick):
    samples = {{"peer": [1.0, 1.0], "ours": [{ours}, {ours}], "other": [3.0, 3.0]}}
    return Report("fake", [Comparison("a step, 1 thread {per} rank", samples, peer="peer")])
"""


def test_two_checkouts_are_compared_by_what_the_topic_compares(tmp_path: Path) -> None:
    from benchmarks.against import run_against

    # The title was another one in older checkouts.
    for name, ours, per in (("before", 1.0, "a"), ("after", 1.5, "per")):
        folder = tmp_path / name / "benchmarks"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "engine.py").write_text((ROOT / "benchmarks" / "engine.py").read_text())
        (folder / "bench_fake.py").write_text(FAKE_TOPIC.format(ours=ours, per=per))
    order: list[str] = []
    report = run_against("fake", tmp_path / "before", tmp_path / "after", rounds=2, progress=order.append)
    assert [line.split(": ")[1] for line in order] == ["before", "after", "after", "before"]
    (table,) = report.tables
    assert table.title == "a step, 1 thread per rank"
    assert table.rows() == [
        ["ours", "1.000", "1.500", "1.500", "1.500 to 1.500", "slower"],
        ["other", "3.000", "3.000", "1.000", "1.000 to 1.000", "no difference"],
    ]
