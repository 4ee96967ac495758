"""Real fits in which a rank is slow, where users meet it: in the module, in the data, in a callback."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest

from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.guard.records import FlightRecorder
from lightning_lockstep.stragglers.exchange import ClockOffset
from tests.common.stragglers.fits import ALL, SLOW, fit
from tests.helpers import run_ranks

#: How far the clock of rank 1 is from that of rank 0 in the cases that need it [s].
AHEAD = 1234.5
#: The fits in which a rank is always slow: which one, and in what.
ALWAYS = {
    "forward": (1, "forward and backward"),
    "data": (1, "data loading"),
    "callback": (0, "callbacks"),
}


def always() -> dict[str, Any]:
    """Fits one after the other, on the same ranks; the first also waits where it logs."""
    return {
        "forward": fit(1, synchronizes=True),
        "data": fit(1, "data"),
        "callback": fit(0, "callback"),
    }


def silent() -> dict[str, Any]:
    """A fit in which nothing of what rank 1 posts about its steps reaches rank 0."""
    channel = current_communicator().side_channel
    post = channel.post

    def kept_back(topic: str, *args: Any, **options: Any) -> Any:
        return None if topic == "straggler/answer" else post(topic, *args, **options)

    with mock.patch.object(channel, "post", kept_back if channel.rank == 1 else post):
        return fit(ALL, steps=12)


def ahead() -> tuple[dict[str, Any], tuple[float, float]]:
    """A fit while the wall clock of rank 1 is ahead, as that of another host may be; and the offset of that clock."""
    channel, real_time = current_communicator().side_channel, time.time
    arrivals, made = FlightRecorder.arrivals, FlightRecorder.__init__

    def later(self: Any, since: float) -> Any:
        return [a._replace(time=a.time + AHEAD) for a in arrivals(self, since - AHEAD)]

    def from_the_start(self: Any) -> None:
        made(self)
        self._since = 0  # its own begin, by the clock that it has

    patches = {"arrivals": later, "__init__": from_the_start} if channel.rank == 1 else {"arrivals": arrivals}
    with (
        mock.patch.object(time, "time", (lambda: real_time() + AHEAD) if channel.rank == 1 else real_time),
        mock.patch.multiple(FlightRecorder, **patches),
    ):
        found, clock = fit(1), ClockOffset(channel)
        clock.measure(8)
        deadline = time.monotonic() + 20
        while channel.rank == 1 and len(clock._answers) < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        current_communicator().barrier()
        clock.close()
        return found, (clock.seconds, clock.error)


def others() -> dict[str, Any]:
    shifted, offset = ahead()
    return {
        "at times": fit(1, "forward", 8, steps=42, seconds=0.3),
        # Every rank sleeps in each step, so that what the machine does beside it is a small share.
        "quiet": fit(ALL, min_share=0.3),
        "silent": silent(),
        "ahead": shifted,
        "offset": {"seconds": offset[0], "error": offset[1], "lines": []},
    }


@pytest.fixture(scope="module")
def slow() -> dict[str, Any]:
    rank_0, rank_1 = run_ranks(2, always, backend="gloo", timeout=120)
    assert not any(case["lines"] for case in rank_1.values()), "rank 0 alone speaks"
    return rank_0


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, others, backend="gloo", timeout=120)


@pytest.mark.parametrize("case", ALWAYS)
def test_a_slow_rank_is_named_with_its_host_and_the_part_of_its_step(slow: dict[str, Any], case: str) -> None:
    found, (rank, where) = slow[case], ALWAYS[case]
    verdict = found["verdict"]
    assert (verdict["rank"], verdict["kind"], verdict["where"]) == (rank, "always", where), found["text"]
    # Whatever else the machine does, the slow rank's sleep is what the other waits for.
    assert 0.5 * SLOW < verdict["lost"] < verdict["step_seconds"], found["text"]
    assert any(line.startswith("StragglerMonitor: since step ") for line in found["lines"])
    assert f"rank {rank} (host " in found["lines"][-1] and f", in {where}." in found["lines"][-1]
    assert {one["straggler/rank"] for one in found["figures"]} >= {float(rank)}
    assert found["figures"][-1]["straggler/lost_share"] > 0.3


def test_a_rank_that_is_slow_in_some_steps_is_slow_at_times(found: list[dict[str, Any]]) -> None:
    case = found[0]["at times"]
    assert (case["verdict"]["rank"], case["verdict"]["kind"]) == (1, "at times"), case["text"]


def test_no_line_where_no_rank_is_slow(found: list[dict[str, Any]]) -> None:
    case = found[0]["quiet"]
    assert "no rank stands out" in case["lines"][-1], case["text"]
    assert not any("since step" in line for line in case["lines"])


def test_a_rank_from_which_nothing_comes_is_named_and_stops_nobody(found: list[dict[str, Any]]) -> None:
    case = found[0]["silent"]
    assert any("no step times came from rank 1" in line for line in case["lines"]), case["text"]


def test_clocks_that_differ_are_set_right(found: list[dict[str, Any]]) -> None:
    case = found[0]["ahead"]
    verdict = case["verdict"]
    assert (verdict["rank"], verdict["kind"]) == (1, "always"), case["text"]
    assert 0.5 * SLOW < verdict["lost"] < verdict["step_seconds"], case["text"]


def test_the_offset_of_a_clock_is_known_to_within_its_own_error(found: list[dict[str, Any]]) -> None:
    zero, one = (each["offset"] for each in found)
    assert (zero["seconds"], zero["error"]) == (0.0, 0.0)
    assert one["error"] > 0 and abs(one["seconds"] + AHEAD) <= one["error"] + 1e-6
