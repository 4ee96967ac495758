"""The estimate of memory that the doctor prints."""

from __future__ import annotations

from lightning_lockstep._text import size_in_words
from lightning_lockstep.doctor.checks.deepspeed import _of_rank, estimate_table

P, LAYER, BUFFER = 8_000_000_000, 4 * 400_000_000, 2 * 500_000_000


def test_each_stage_divides_one_part_more_among_ranks() -> None:
    found = [row[3:] for row in _of_rank(P, 16) if row[1] == "none"]
    share = P // 16
    assert [device for device, _, _ in found] == [
        20 * P,
        4 * P + 16 * share + BUFFER,
        2 * P + 18 * share + BUFFER,
        20 * share + BUFFER + LAYER,
    ]
    assert all(elsewhere == [0, 0] for _, *elsewhere in found)


def test_what_is_offloaded_is_elsewhere() -> None:
    share = P // 16
    found = {row[:3]: row[3:] for row in _of_rank(P, 16)}
    assert found[2, "cpu", "none"] == (2 * P + BUFFER, 18 * share, 0)
    assert found[3, "cpu", "cpu"] == (BUFFER + LAYER, 20 * share, 0)
    device, host, disk = found[3, "nvme", "nvme"]
    assert (device, disk) == (BUFFER + LAYER, 18 * share) and host > 2 * share


def test_the_table_is_of_a_node() -> None:
    lines = estimate_table(P, 16, 8).splitlines()
    assert len(lines) == 11 and "offload_param" in lines[0]
    assert size_in_words(20 * P) in lines[1]
    assert size_in_words(8 * 18 * P // 16) in lines[5]
