"""Real fits in which a rank is slow, where users meet it: in the module, in the data, in a callback."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from lightning_lockstep.distributed import current_communicator
from tests.harness import run_ranks
from tests.models.stragglers.fits import ALL, SLOW, fit

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
        return None if "straggler/" in topic else post(topic, *args, **options)

    with mock.patch.object(channel, "post", kept_back if channel.rank == 1 else post):
        return fit(ALL, steps=12)


def others() -> dict[str, Any]:
    return {
        "at times": fit(1, "forward", 8, steps=42, seconds=0.3),
        # Every rank sleeps in each step, so that what the machine does beside it is a small share.
        "quiet": fit(ALL, min_share=0.3),
        "silent": silent(),
        "accumulating": fit(1, "data", seconds=SLOW / 3, accumulate=3),
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
    assert (verdict["rank"], verdict["where"]) == (rank, where), found["text"]
    assert 2 * verdict["slow_steps"] > verdict["steps"], found["text"]
    # Whatever else the machine does, the slow rank's sleep is what the other waits for.
    assert 0.5 * SLOW < verdict["lost"] < verdict["step_seconds"], found["text"]
    assert any(line.startswith("StragglerMonitor: since step ") for line in found["lines"])
    assert f"rank {rank} (host " in found["lines"][-1] and f", in {where}." in found["lines"][-1]
    assert {one["straggler/rank"] for one in found["figures"]} >= {float(rank)}
    assert found["figures"][-1]["straggler/lost_share"] > 0.3


def test_in_how_many_steps_a_rank_is_slow(found: list[dict[str, Any]]) -> None:
    verdict = found[0]["at times"]["verdict"]
    assert verdict["rank"] == 1 and 0 < 2 * verdict["slow_steps"] < verdict["steps"], verdict


def test_no_line_where_no_rank_is_slow(found: list[dict[str, Any]]) -> None:
    case = found[0]["quiet"]
    assert "no rank stands out" in case["lines"][-1], case["text"]
    assert not any("since step" in line for line in case["lines"])


def test_a_rank_from_which_nothing_comes_is_named_and_stops_nobody(found: list[dict[str, Any]]) -> None:
    case = found[0]["silent"]
    assert any("no step times came from rank 1" in line for line in case["lines"]), case["text"]


def test_a_step_is_all_batches_up_to_the_one_that_reduces_gradients(found: list[dict[str, Any]]) -> None:
    case = found[0]["accumulating"]
    verdict = case["verdict"]
    assert (verdict["rank"], verdict["where"]) == (1, "data loading"), case["text"]
    assert 0.5 * SLOW < verdict["lost"] < verdict["step_seconds"], case["text"]
