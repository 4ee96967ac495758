"""The estimate of memory: each part is somewhere once, and divided as the stage says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_lockstep._text import size_in_words
from lightning_lockstep.deepspeed.memory_estimate import MemoryEstimate, estimate_memory, estimate_table, main
from lightning_lockstep.errors import ConfigurationError

P, L = 7_000_000_000, 100_000_000


def estimate(stage: int, **options: Any) -> MemoryEstimate:
    given = {"parameters": P, "largest_layer": L, "ranks": 16, "ranks_per_node": 8, "stage": stage, **options}
    return estimate_memory(**given)


def test_every_part_is_somewhere_once() -> None:
    """Offloading moves weights, master weights and optimizer state; it loses and doubles nothing."""
    for stage in (1, 2, 3):
        plain, offloaded = estimate(stage), estimate(stage, offload_optimizer="cpu")
        for part in ("weights", "master_weights", "optimizer_state"):
            moved = getattr(offloaded.host, part) / 8 + getattr(offloaded.device, part)
            assert moved == getattr(plain.device, part), (stage, part)
        assert offloaded.device.total < plain.device.total
        assert plain.host.total == 0
    everything = estimate(3, offload_optimizer="nvme", offload_param="nvme")
    assert everything.device.weights == everything.host.weights == 0
    assert everything.nvme.weights == 8 * 2 * P // 16
    assert everything.nvme.optimizer_state == 8 * 8 * P // 16
    assert everything.host.total == everything.host.buffers + everything.host.gradients


def test_each_stage_partitions_one_part_more() -> None:
    parts = [estimate(stage).device for stage in (0, 1, 2, 3)]
    assert [part.weights for part in parts] == [2 * P, 2 * P, 2 * P, 2 * P // 16]
    assert [part.gradients for part in parts] == [6 * P, 2 * P + P // 4, 6 * P // 16, 6 * P // 16]
    assert [part.master_weights for part in parts] == [4 * P, *[4 * P // 16] * 3]
    assert [part.optimizer_state for part in parts] == [8 * P, *[8 * P // 16] * 3]
    assert [part.largest_layer for part in parts] == [0, 0, 0, 4 * L]


def test_float32_has_copies_under_zero_too() -> None:
    parts = [estimate(stage, precision="32-true").device for stage in (0, 1, 2, 3)]
    assert [part.weights for part in parts] == [4 * P, 4 * P, 4 * P, 4 * P // 16]
    assert [part.master_weights for part in parts] == [0, *[4 * P // 16] * 3]
    assert parts[0].gradients == 4 * P
    assert estimate(3, precision="32-true", offload_optimizer="cpu").host.master_weights == 8 * 4 * P // 16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 4}, "stage=4: expected one of 0, 1, 2, 3"),
        ({"stage": 2, "offload_param": "cpu"}, "stage=2: expected 3 for offload_param='cpu'"),
        ({"stage": 2, "offload_optimizer": "nvme"}, "stage=2: expected stage 3 or higher"),
        ({"stage": 2, "offload_optimizer": "gpu"}, "offload_optimizer='gpu': expected one of"),
        ({"stage": 2, "ranks": 7, "ranks_per_node": 2}, "ranks=7: expected a multiple of 2"),
        (
            {"stage": 3, "largest_layer": 8 * 10**9},
            "largest_layer=8000000000: expected part of the parameters",
        ),
    ],
)
def test_values_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        estimate(**options)


def test_the_table_has_every_stage_and_way_of_offloading() -> None:
    table = estimate_table(parameters=P, ranks=16, ranks_per_node=8)
    rows = [line.split()[:3] for line in table.splitlines()[1:]]
    assert rows == [
        ["0", "none", "none"],
        ["1", "none", "none"],
        ["1", "cpu", "none"],
        ["2", "none", "none"],
        ["2", "cpu", "none"],
        ["3", "none", "none"],
        ["3", "cpu", "none"],
        ["3", "cpu", "cpu"],
        ["3", "nvme", "cpu"],
        ["3", "nvme", "nvme"],
    ]
    assert size_in_words(estimate(0).device.total) in table.splitlines()[1]


def test_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-params", "7e9", "--gpus", "8", "--nodes", "2", "--largest-layer", "1e8"]) == 0
    printed = capsys.readouterr().out
    assert "7,000,000,000 parameters on 2 x 8 GPUs, bf16-mixed" in printed
    stage3 = next(line for line in printed.splitlines() if re.match(r"\s+3\s+none", line))
    assert size_in_words(estimate(3).device.total) in stage3
