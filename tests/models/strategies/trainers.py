"""What each Trainer of a script has to come to, and runs of ``several_trainers.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness import MODELS, ScriptOutcome, run_script
from tests.models.strategies.several_trainers import SAMPLES

SCRIPT = MODELS / "strategies" / "several_trainers.py"
LIMIT = 300.0  # only so that a hang ends the test
PYTHON = [sys.executable]

# In this order: right on this many ranks, or refused with these words.
OTHER_RANKS = "an earlier Trainer, or the program that started it, has connected"
TOO_LATE = "has run on fewer ranks, or on ranks that were started another way"


def run(command: list[str], *args: str, folder: Path) -> ScriptOutcome:
    outcome = run_script([*command, str(SCRIPT), *args], timeout=LIMIT, cwd=folder)
    assert not outcome.timed_out, outcome.output
    assert outcome.leftovers == (), f"no rank is left behind: {outcome.output}"
    return outcome


def check_trainers(
    command: list[str], table: dict[str, int | str], strategy: str, ranks: int, folder: Path
) -> ScriptOutcome:
    """Check that each Trainer of a script is right, or one error of all ranks; return how the script ended."""
    cases = {case.format(strategy): expected for case, expected in table.items()}
    outcome = run(command, "catch", *cases, folder=folder)
    assert outcome.returncode == 0, outcome.output
    for rank in range(ranks):
        lines = (folder / f"rank{rank}").read_text().splitlines()
        said = dict(line.split(" ", 1) for line in lines)
        assert list(said) == list(cases), outcome.output
        for case, expected in cases.items():
            if isinstance(expected, str):
                assert said[case].startswith("LaunchError") and expected in said[case], said[case]
            else:
                share = expected if case.startswith("predict") else 1
                assert said[case] == str((SAMPLES // share, expected, rank == 0)), (case, said[case])
    assert "\x1b" not in outcome.output, "no bars are drawn where there is no terminal"
    # Only the first rank of a Trainer has written; a refused one has written nothing.
    worked = [case for case, expected in cases.items() if isinstance(expected, int)]
    assert len(list((folder / "runs" / "lightning_logs").iterdir())) == len(worked)
    return outcome


def check_uncaught(cases: list[str], expected: str, folder: Path) -> None:
    """Check that an error which nobody catches is printed once."""
    outcome = run(PYTHON, "raise", *cases, folder=folder)
    assert outcome.returncode == 1, outcome.output
    assert outcome.stderr.count(f"errors.LaunchError: devices={cases[1][-1]}") == 1, outcome.output
    assert expected in outcome.stderr
    for trace in ("Traceback", "CollectiveStallError", "Exception ignored"):
        assert trace not in outcome.stderr
