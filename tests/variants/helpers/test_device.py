"""``--device`` chooses the tests with a ``device`` fixture, and what they train on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import on_device, run_ranks
from tests.helpers.device import DEVICE

ROOT = Path(__file__).parents[3]


def collected() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--device", "cpu", "--collect-only", "-q", "-n", "0"]
    return subprocess.run(
        [*command, "tests/unit/replicas/test_checksums.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_only_tests_with_the_fixture_are_left() -> None:
    listed = [line for line in collected().stdout.splitlines() if "::" in line]
    assert listed and all("::test_every_bit_counts[" in line for line in listed)


def settings() -> tuple[str, list[str], str]:
    """What two ranks that share a card are given; no card is touched for it."""
    given = on_device(2)
    accelerator = given["accelerator"]
    devices = accelerator.get_parallel_devices(accelerator.parse_devices(given["devices"]))
    return (
        accelerator.name(),
        [str(one) for one in devices],
        torch.distributed.Backend.default_device_backend_map["cuda"],
    )


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="each rank has a card of its own here")
def test_two_ranks_share_the_first_card_over_gloo() -> None:
    assert run_ranks(1, settings, backend=None, env={DEVICE: "cuda"}) == [
        ("cuda", ["cuda:0", "cuda:0"], "gloo")
    ]
    assert on_device(2) == {"accelerator": "cpu", "devices": 2}
