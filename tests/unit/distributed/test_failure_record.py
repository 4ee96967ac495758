"""Tracebacks show the user's own frames; errors of this package are their message alone; which errors are causes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_lockstep.distributed.failure.process_exit import (
    ExitReport,
    error_from_bytes,
    error_to_bytes,
    set_exit_report,
)
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    is_broken_collective,
)
from lightning_lockstep.distributed.failure.tracebacks import format_error, user_function
from lightning_lockstep.errors import ConfigurationError, RankFailedError
from tests.harness import QUIET

# A fit warns of what other packages deprecate.
pytestmark = pytest.mark.filterwarnings("ignore")


@contextmanager
def measured() -> Iterator[None]:
    yield


class Fails(pl.LightningModule):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(4, 1), error

    @measured()  # a frame of the standard library
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        return nn.Sequential(nn.Identity(), self.layer)(batch[:, :3]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def raised(error: BaseException | None = None) -> BaseException:
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, **QUIET)
    with pytest.raises(BaseException) as caught:
        trainer.fit(Fails(error), torch.utils.data.DataLoader(torch.randn(4, 4)))
    return caught.value


def test_frames_of_libraries_are_counted_and_the_last_one_shown() -> None:
    error = raised()
    text = format_error(error)
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("RuntimeError: ") and "mat1 and mat2 shapes" in lines[-1]
    assert "in training_step" in text and "in raised" in text
    assert text.count("LOCKSTEP_FULL_TRACEBACK=1 shows them") == 1
    folded = [line for line in lines if line.startswith("  ... ")]
    assert len(folded) == 2 and "lightning" in folded[0] and folded[1].endswith("frames of torch")
    shown = [line for line in lines if line.startswith("  File")]
    assert "linear.py" in shown[-1] and sum("site-packages" in line for line in shown) == 1
    assert len(lines) < 30
    assert user_function(error) == "training_step"


def test_all_frames_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FULL_TRACEBACK", "1")
    text = format_error(raised())
    assert "  ... " not in text and text.count("site-packages") > 10


def test_causes_notes_and_groups_are_kept() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        text = format_error(error)
    assert text.index("KeyError: 'inner'") < text.index("direct cause") < text.index("ValueError: outer")
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904
    except ValueError as error:
        assert "During handling" in format_error(error)
    if hasattr(__builtins__, "ExceptionGroup") or "ExceptionGroup" in dir(__import__("builtins")):
        group = __import__("builtins").ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        assert "ValueError: one" in format_error(group) and "KeyError: 'two'" in format_error(group)


def test_an_error_of_this_package_is_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(ConfigurationError("given 3, expected 4"))
    assert format_error(error) == "lightning_lockstep.errors.ConfigurationError: given 3, expected 4\n"
    record = FailureRecord(1, 2, "h", 1, "exception", "ValueError: boom")
    assert format_error(raised(RankFailedError(record.report(), record))).startswith("Traceback")
    monkeypatch.setenv("LOCKSTEP_FULL_TRACEBACK", "1")
    assert format_error(error).startswith("Traceback")


class Particular(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


@pytest.mark.parametrize("error", [ValueError("boom"), Particular("boom", "twice")])
def test_an_error_of_another_process_is_printed_as_there(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    try:
        raise error
    except Exception:
        set_exit_report(error, ExitReport("rank 0 of 2 failed"))
        arrived = error_from_bytes(error_to_bytes(error))
    assert type(arrived) is (ValueError if type(error) is ValueError else RuntimeError)
    sys.excepthook(type(arrived), arrived, None)
    printed = capsys.readouterr().err
    assert "in test_an_error_of_another_process_is_printed_as_there" in printed
    assert f"{type(error).__name__}: boom" in printed
    assert printed.splitlines()[-1] == "rank 0 of 2 failed"


def test_of_a_very_long_text_the_headline_has_the_beginning_and_the_traceback_all() -> None:
    text = "x" * 9_000_000
    record = describe_error(ValueError(text), 0, 1)
    assert len(record.headline()) < 500
    assert "9,000,000 characters; all of them are in the traceback" in record.headline()
    assert record.report().count(text) == 1


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("[.../gloo/transport/tcp/pair.cc:537] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (ConnectionResetError("reset"), True),
        (
            RuntimeError("Got the following error when running the callback: RankFailedError: rank 1 of 2"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_consequences_are_told_from_causes(error: BaseException, broken: bool) -> None:
    assert is_broken_collective(error) is broken
