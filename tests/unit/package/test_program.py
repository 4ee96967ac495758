"""Only the processes of our own commands go without the strategies."""

from __future__ import annotations

import sys

import pytest

from lightning_lockstep._registry import is_command

DOCTOR = "lightning_lockstep.doctor"


@pytest.mark.parametrize(
    ("argv0", "orig_argv", "expected"),
    [
        ("/opt/venv/bin/lockstep-doctor", ["python", "/opt/venv/bin/lockstep-doctor", "cuda"], True),
        ("-m", ["python", "-m", DOCTOR, "cuda"], True),
        ("-m", ["python", "-X", "dev", "-m", f"{DOCTOR}.child_process"], True),
        ("-m", ["python", "-m", f"{DOCTOR}_of_others"], False),
        ("-m", ["python", "-m", "pytest", "-m", DOCTOR], False),
        ("train.py", ["python", "train.py", "-m", DOCTOR], False),
        ("/opt/venv/bin/lockstep-train", ["python", "/opt/venv/bin/lockstep-train"], True),
        ("-m", ["python", "-m", "lightning_lockstep.train", "--help"], True),
        ("train.py", ["python", "train.py"], False),
        ("", ["python"], False),
    ],
)
def test_is_command(
    argv0: str, orig_argv: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [argv0])
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert is_command() is expected
