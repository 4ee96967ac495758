"""Every fifth of all faults in all phases of a program; LOCKSTEP_ALL_PHASES=1 takes all, ten minutes on two cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.models.distributed.phases import Case, cases, differences

STEP = 1 if os.environ.get("LOCKSTEP_ALL_PHASES") else 5


@pytest.mark.parametrize("case", cases()[::STEP], ids=str)
def test_a_fault_ends_the_program_as_the_rules_say(case: Case, tmp_path: Path) -> None:
    assert differences(case, tmp_path) == []
