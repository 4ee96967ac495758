"""What is wrong with settings, collected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from lightning_lockstep._settings import Faults, did_you_mean, nearest
from lightning_lockstep.errors import ConfigurationError


def said(check: Callable[[Faults], Any]) -> list[str]:
    """The faults that one check adds; what it returns agrees with them."""
    faults = Faults()
    assert check(faults) == (faults.texts == [])
    return faults.texts


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (lambda f: f.check(False, "a", "x", "a list"), "a='x': expected a list."),
        (
            lambda f: f.choice("mode", "modle", ("model", "off")),
            "mode='modle': expected one of 'model', 'off'. Did you mean 'model'?",
        ),
        (lambda f: f.choice("mode", 3, ("model", None)), "mode=3: expected one of 'model', None."),
        (
            lambda f: f.choice("hook", "zip", ("fp16",), more="or a function"),
            "hook='zip': expected one of 'fp16' or a function.",
        ),
        (
            lambda f: f.number("share", 1.5, what="a share", above=0, below=1),
            "share=1.5: expected a share, more than 0 and less than 1.",
        ),
        (
            lambda f: f.number("share", 1, least=0, below=1),
            "share=1: expected a number, 0 or more and less than 1.",
        ),
        (lambda f: f.number("time", math.nan), "time=nan: expected a number."),
        (lambda f: f.number("time", math.inf, above=0), "time=inf: expected a number, more than 0."),
        (lambda f: f.number("time", True), "time=True: expected a number."),
        (
            lambda f: f.number("time", "5", what="seconds", above=0, such_as=30),
            "time='5': expected seconds, more than 0, such as 30.",
        ),
        (lambda f: f.number("time", None), "time=None: expected a number."),
        (lambda f: f.whole("count", 0), "count=0: expected a whole number from 1."),
        (lambda f: f.whole("count", True), "count=True: expected a whole number from 1."),
        (
            lambda f: f.whole("count", 2.0, what="a whole number of checks"),
            "count=2.0: expected a whole number of checks from 1.",
        ),
        (
            lambda f: f.whole("code", 300, least=0, most=255),
            "code=300: expected a whole number from 0 to 255.",
        ),
        (lambda f: f.flag("fold", 1), "fold=1: expected true or false."),
    ],
)
def test_what_is_wrong_is_said_with_what_was_given_and_what_was_expected(
    check: Callable[[Faults], Any], text: str
) -> None:
    assert said(check) == [text]


def test_an_unknown_name_is_said_with_the_nearest_or_with_all() -> None:
    faults = Faults()
    faults.unknown(["modee", "zzz", "plot"], ["plot", "mode"], owner="AutoBatchSize")
    assert faults.texts == [
        "AutoBatchSize has no option 'modee'. Did you mean 'mode'?",
        "AutoBatchSize has no option 'zzz'. It takes mode, plot.",
    ]


def test_all_faults_are_raised_as_one_error_with_their_owner() -> None:
    faults = Faults("OverflowDetector")
    faults.raise_all()
    faults.flag("gradients", 3)
    faults.add("too late.")
    with pytest.raises(ConfigurationError, match="2 settings cannot be used") as caught:
        faults.raise_all()
    assert caught.value.faults == (
        "OverflowDetector: gradients=3: expected true or false.",
        "OverflowDetector: too late.",
    )


def test_the_nearest_names_ignore_case_and_stay_silent_when_nothing_is_near() -> None:
    epochs = ["max_epochs", "min_epochs"]
    assert did_you_mean("DDP", ["ddp", "single"]) == " Did you mean 'ddp'?"
    assert did_you_mean("max_epoch", epochs) == " Did you mean 'max_epochs' or 'min_epochs'?"
    assert did_you_mean("max_epoch", epochs, most=1) == " Did you mean 'max_epochs'?"
    assert did_you_mean("xyz", ["ddp", "single"]) == did_you_mean("", ["ddp"]) == ""
    assert nearest("SyncedEarlyStopping", ["lr_monitor", "early_stopping"]) == ["early_stopping"]
    assert nearest("fsdp", ["mpi", "single"]) == []
