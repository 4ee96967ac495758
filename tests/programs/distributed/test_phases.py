"""A fault in one phase of a program: what each rank raises, the exit code, what is said, and that nobody waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.distributed.phases import Case, differences

#: One case for each rule; all of them are in tests/variants.
CASES = (
    Case("validation_end", "raise", "1"),
    Case("validation_end", "kill", "0"),
    Case("validation_end", "never", "1"),
    Case("optimizer", "_exit0", "1"),
    Case("forward", "exit0", "all"),
    Case("forward", "ctrl_c", "1"),
    Case("train_end", "kill", "1"),
    Case("between", "raise", "0"),
    Case("between", "exit0", "1"),
    Case("second", "raise", "0"),
    Case("after", "kill", "1"),
    Case("after", "other", "0"),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_ends_the_program_as_the_rules_say(case: Case, tmp_path: Path) -> None:
    assert differences(case, tmp_path) == []
