"""What is answered without importing torch and Lightning, which takes seconds: help, completion, typing errors."""

from __future__ import annotations

import re
import sys

from tests.harness import run_script

ASKED = {
    "--hydra-help": "--shell-completion",  # first: Hydra says it once in a process
    "--help": "trains a model on one or many ranks",
    "--version": "lightning-lockstep ",
    "--cfg job": "max_epochs: 5",
    "-sc query=bash": "trainer.max_epochs=",
    "trainer.max_epoch=3": "Did you mean 'max_epochs'",
    "strategy=dpp model.learning_rat=1": "Did you mean 'learning_rate'",
    "--multirn": "there is no such flag",
    "callbacks.overflow.verbos=1": "It comes with the option callbacks=overflow",
}
# As the console command does it, once for each; then it says what was imported.
COMMAND = """
import sys

asked, sys.argv[:] = sys.argv[1:], ["lockstep-train"]
from lightning_lockstep.train import main

for arguments in asked:
    print("#### asked", arguments, flush=True)
    sys.argv = ["lockstep-train", *arguments.split()]
    try:
        main()
    except SystemExit:
        pass
    sys.stdout.flush()
print("#### imported", *sorted({"torch", "lightning", "zmq"} & sys.modules.keys()))
"""


def asked(*arguments: str, **environ: str) -> dict[str, str]:
    """Answers by what was asked, and what was ``imported``."""
    line = "lockstep-train trainer.max_e"
    outcome = run_script(
        ["sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, "-c", COMMAND, *arguments],
        env={"COMP_LINE": line, "COMP_POINT": str(len(line)), "COLUMNS": "100", **environ},
        fresh=True,
    )
    parts = re.split(r"^#### (?:asked )?", outcome.stdout, flags=re.MULTILINE)[1:]
    return dict(part.split("\n", 1) if "\n" in part else (part, "") for part in parts)


def test_it_takes_neither_torch_nor_lightning() -> None:
    answers = asked(*ASKED)
    for arguments, expected in ASKED.items():
        assert expected in answers[arguments], answers
    assert "imported" in answers, answers  # without names behind it


def test_the_help_of_a_users_own_program_does_not_either() -> None:
    code = "import sys, lightning_lockstep.train; print(*sorted({'torch', 'lightning'} & sys.modules.keys()))"
    outcome = run_script([sys.executable, "-c", code, "--help"], fresh=True)
    assert (outcome.returncode, outcome.stdout) == (0, "\n"), outcome.output
