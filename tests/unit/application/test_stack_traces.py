"""Who asks for stack traces gets them before the message."""

from __future__ import annotations

import pytest

from lightning_lockstep._application.values import Fault, show_faults


def fault() -> Fault:
    try:
        raise ValueError("deep inside")
    except ValueError as error:
        return Fault("a=1: wrong.", error)


def test_only_the_message_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    show_faults("lockstep-train", [fault()], stack_traces=False)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "HYDRA_FULL_ERROR=1 shows" in shown


def test_the_exceptions_first_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    show_faults("lockstep-train", [fault()], stack_traces=True)
    shown = capsys.readouterr().err
    assert shown.index("ValueError: deep inside") < shown.index("1. a=1: wrong.")
    assert "HYDRA_FULL_ERROR" not in shown
