"""What is answered without importing torch and Lightning, which takes seconds: help, completion, typing errors."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import lightning_lockstep
from lightning_lockstep._application.signatures import read_target
from lightning_lockstep._application.values import mismatch
from lightning_lockstep._application.values import target_of as imported
from tests.helpers import run_script

CONF = Path(lightning_lockstep.__file__).parent / "conf"
TARGETS = sorted(
    {
        name
        for file in CONF.rglob("*.yaml")
        for name in re.findall(r"_target_: (lightning\S+)", file.read_text())
    }
)
# As the console command does it, and then says what was imported.
COMMAND = """
import atexit, sys
atexit.register(lambda: print("imported:", *sorted({"torch", "lightning", "zmq"} & sys.modules.keys())))
sys.argv[0] = "lockstep-train"
from lightning_lockstep.train import main
main()
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--help", "trains a model on one or many ranks"),
        ("--version", "lightning-lockstep "),
        ("--cfg job", "max_epochs: 5"),
        ("--hydra-help", "--shell-completion"),
        ("-sc query=bash", "trainer.max_epochs="),
        ("trainer.max_epoch=3", "Did you mean 'max_epochs'"),
        ("strategy=dpp model.learning_rat=1", "Did you mean 'learning_rate'"),
        ("trainer.max_epochs=ten", "expected a whole number or null"),
        ("+trainer.max_epoch=3", "Trainer has no setting 'max_epoch'"),
    ],
)
def test_it_takes_neither_torch_nor_lightning(arguments: str, expected: str) -> None:
    line = "lockstep-train trainer.max_e"
    outcome = run_script(
        [sys.executable, "-c", COMMAND, *arguments.split()],
        env={"COMP_LINE": line, "COMP_POINT": str(len(line)), "COLUMNS": "100"},
        fresh=True,
    )
    assert expected in outcome.output
    assert outcome.stdout.splitlines()[-1] == "imported:", outcome.output


def test_a_fault_that_only_a_constructor_finds_is_reported_beside_the_others() -> None:
    arguments = ["trainer.max_epochs=ten", "model.learning_rate=-1"]
    outcome = run_script([sys.executable, "-c", COMMAND, *arguments], fresh=True)
    assert outcome.returncode == 2
    assert "2 errors" in outcome.stderr
    assert "importing torch and Lightning to check the rest" in outcome.stderr.splitlines()[0]


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_read_of_a_target_is_what_it_has(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = imported(OmegaConf.create({"_target_": target}))
    assert real is not None
    monkeypatch.delitem(sys.modules, "torch")
    read = read_target(target)
    monkeypatch.undo()
    assert read is not None
    assert read.__name__ == real.__name__
    found, expected = inspect.signature(read).parameters, inspect.signature(real).parameters
    assert list(found) == list(expected)
    hints, real_hints = _types(read), _types(real)
    for name in expected:
        assert found[name].kind == expected[name].kind
        for value in (3, 1.5, "text", None, True):
            said = mismatch(value, hints.get(name), default=found[name].default)
            wanted = mismatch(value, real_hints.get(name), default=expected[name].default)
            assert str(said) == str(wanted), (name, value)


def _types(target: object) -> dict[str, object]:
    from lightning_lockstep._application import values

    return values._hints(target)  # type: ignore[arg-type]
