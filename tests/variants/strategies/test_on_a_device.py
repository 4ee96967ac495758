"""The CPU's numbers on four ranks."""

from __future__ import annotations

from tests.harness import run_ranks
from tests.programs.strategies.test_on_a_device import beside_the_cpu, check_numbers


def test_fit_and_evaluation_of_four_ranks_are_those_of_one_process_on_the_cpu(device: str) -> None:
    check_numbers(run_ranks(4, beside_the_cpu, 4, backend=None, timeout=120))
