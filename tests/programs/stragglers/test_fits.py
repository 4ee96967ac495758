"""Real fits in which a rank is slow, where users meet it: in the module, in the data, in a callback."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.guard.records import FlightRecorder
from lightning_lockstep.stragglers.exchange import ClockOffset
from tests.common.distributed.mpi.launch import mpi_command, mpi_environ, why_no
from tests.common.stragglers.fits import ALL, SLOW, fit
from tests.helpers import COMMON, run_ranks, run_ranks_raw, run_script

#: How far the clock of rank 1 is from that of rank 0 in the tests that need it [s].
AHEAD = 1234.5
PROGRAM = COMMON / "stragglers" / "program_mpi.py"


def cases() -> dict[str, Any]:
    """Fits one after the other, on the same ranks."""
    return {
        "forward": fit(1),
        "data": fit(1, "data"),
        "callback": fit(0, "callback"),
        "at times": fit(1, "forward", 8, steps=42, seconds=0.5),
        "log": fit(1, synchronizes=True),
    }


def test_a_slow_rank_is_named_with_its_host_and_the_part_of_its_step() -> None:
    rank_0, rank_1 = run_ranks(2, cases, backend="gloo", timeout=120)
    assert not any(case["lines"] for case in rank_1.values()), "rank 0 alone speaks"
    for case, rank, where in (
        ("forward", 1, "forward and backward"),
        ("data", 1, "data loading"),
        ("callback", 0, "callbacks"),
        ("log", 1, "forward and backward"),
    ):
        found = rank_0[case]
        verdict = found["verdict"]
        assert (verdict["rank"], verdict["kind"], verdict["where"]) == (rank, "always", where), found["text"]
        # Whatever else the machine does, the slow rank's sleep is what the other waits for.
        assert 0.5 * SLOW < verdict["lost"] < verdict["step_seconds"], found["text"]
        assert any(line.startswith("StragglerMonitor: since step ") for line in found["lines"])
        assert f"rank {rank} (host " in found["lines"][-1] and f", in {where}." in found["lines"][-1]
        assert {one["straggler/rank"] for one in found["figures"]} >= {float(rank)}
        assert found["figures"][-1]["straggler/lost_share"] > 0.3
    found = rank_0["at times"]
    assert (found["verdict"]["rank"], found["verdict"]["kind"]) == (1, "at times"), found["text"]


def quiet() -> dict[str, Any]:
    # Every rank sleeps in each step, so that what the machine does beside it is a small share.
    return fit(ALL, min_share=0.3)


def test_no_line_where_no_rank_is_slow_and_none_on_one_rank() -> None:
    rank_0, _ = run_ranks(2, quiet, backend="gloo", timeout=60)
    assert "no rank stands out" in rank_0["lines"][-1], rank_0["text"]
    assert not any("since step" in line for line in rank_0["lines"])
    (alone,) = run_ranks(1, quiet, backend=None, timeout=60)
    assert [line for line in alone["lines"] if "there is one rank" in line] == alone["lines"] != []


def shifted() -> dict[str, Any]:
    """A fit with a third rank; the wall clock of rank 1 is ahead, as that of another host may be."""
    if current_communicator().rank == 1:
        real_time, arrivals = time.time, FlightRecorder.arrivals
        time.time = lambda: real_time() + AHEAD

        def later(self: Any, since: float) -> Any:
            return [a._replace(time=a.time + AHEAD) for a in arrivals(self, since - AHEAD)]

        FlightRecorder.arrivals = later  # type: ignore[method-assign]
        made = FlightRecorder.__init__

        def from_the_start(self: Any) -> None:
            made(self)
            self._since = 0  # its own begin, by the clock that it has

        FlightRecorder.__init__ = from_the_start  # type: ignore[method-assign]
    return fit(2)


def test_three_ranks_whose_clocks_differ() -> None:
    found = run_ranks(3, shifted, backend="gloo", timeout=60)[0]
    verdict = found["verdict"]
    assert (verdict["rank"], verdict["kind"]) == (2, "always"), found["text"]
    assert 0.5 * SLOW < verdict["lost"] < verdict["step_seconds"], found["text"]


def offset() -> tuple[float, float]:
    channel = current_communicator().side_channel
    if channel.rank == 1:
        real_time = time.time
        time.time = lambda: real_time() + AHEAD
    clock = ClockOffset(channel)
    clock.measure(8)
    deadline = time.monotonic() + 20
    while channel.rank == 1 and len(clock._answers) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    current_communicator().barrier()
    clock.close()
    return clock.seconds, clock.error


def test_the_offset_of_a_clock_is_known_to_within_its_own_error() -> None:
    (seconds, error), (of_rank_1, error_1) = run_ranks(2, offset, backend="gloo", timeout=60)
    assert (seconds, error) == (0.0, 0.0)
    assert error_1 > 0 and abs(of_rank_1 + AHEAD) <= error_1 + 1e-6


def silent() -> dict[str, Any]:
    """A fit in which nothing of what rank 1 posts about its steps reaches rank 0."""
    channel = current_communicator().side_channel
    if channel.rank == 1:
        post = channel.post
        channel.post = lambda topic, *args, **options: (  # type: ignore[method-assign]
            None if topic == "straggler/answer" else post(topic, *args, **options)
        )
    return fit(ALL, steps=12)


def test_a_rank_from_which_nothing_comes_is_named_and_stops_nobody() -> None:
    rank_0, _ = run_ranks(2, silent, backend="gloo", timeout=60)
    assert any("no step times came from rank 1" in line for line in rank_0["lines"]), rank_0["text"]


def raising() -> None:
    fit(1, "raise", 5, steps=20)


def test_an_exception_on_one_rank_ends_the_run_as_it_does_without_the_monitor() -> None:
    outcomes = run_ranks_raw(2, raising, backend="gloo", timeout=60)
    assert not any(outcome.ok for outcome in outcomes)
    assert not any(outcome.killed_by_helper for outcome in outcomes)
    assert any("a bad batch on purpose" in outcome.stderr + str(outcome.traceback) for outcome in outcomes)


@pytest.mark.mpi
@pytest.mark.skipif(why_no("open_mpi") is not None, reason=str(why_no("open_mpi")))
def test_over_mpi(tmp_path: Path) -> None:
    outcome = run_script(
        [*mpi_command("open_mpi", 2), str(PROGRAM), str(tmp_path)], env=mpi_environ(), timeout=120
    )
    assert outcome.returncode == 0, outcome.output
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["backend"] == "mpi4py"
    verdict = found["verdict"]
    assert (verdict["rank"], verdict["kind"], verdict["where"]) == (1, "always", "data loading"), found[
        "text"
    ]
