"""The jobs of a sweep: which there are, what became of each, and how those that were not run are run."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from lightning_lockstep._application.masking import Mask
from lightning_lockstep._application.signatures import typed_lines
from lightning_lockstep._text import first_line, plain_table


def swept_values(overrides: list[Override], *, multirun: bool) -> tuple[list[list[str]], list[str]]:
    """Return each override as one line for each value that a sweep gives it, and what is wrong with them."""
    faults = []
    values: list[list[str]] = []
    for override in overrides:
        line = str(override.input_line)
        if not override.is_sweep_override():
            values.append([line])
        elif not multirun:
            how = f"write a list as {override.key_or_group}=[{override.get_value_string()}]"
            faults.append(f"{line}: several values. Add -m to run a job for each, or {how}.")
        elif override.is_discrete_sweep():  # of an interval only the sweeper knows the values
            prefix = line.split("=", 1)[0]
            values.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
    return values, faults


def variants(values: list[list[str]]) -> Iterator[list[str]]:
    """Divide a sweep into jobs, one at least, in which every value occurs once."""
    first = [options[0] for options in values]
    yield first
    for place, options in enumerate(values):
        yield from ([*first[:place], option, *first[place + 1 :]] for option in options[1:])


class Sweep:
    """What became of the jobs that this process has run."""

    def __init__(self) -> None:
        self.planned: list[list[str]] = []  # lines of each job, in their order; empty if only a sweeper knows
        self.command: list[str] = []  # of the program, with its flags
        self._jobs: list[tuple[int, str, str, str]] = []

    def plan(self, values: list[list[str]], command: list[str]) -> None:
        """Note which jobs Hydra's own sweeper makes."""
        self.planned, self.command = list(map(list, itertools.product(*values))), command

    def note(self, config: DictConfig, objective: Any, error: BaseException | None) -> None:
        """Note how a job has ended."""
        lines = Mask(config).masked(typed_lines(config))
        value = f"{objective:.6g}" if isinstance(objective, (int, float)) else "-"
        if isinstance(error, SystemExit):
            end = str(error.code)
        else:
            end = "0" if error is None else f"{type(error).__name__}: {first_line(error)}"
        self._jobs.append((config.hydra.job.num, " ".join(lines), value, end))

    def report(self) -> str:
        """A table of the jobs, and the commands of those that were not run; empty if there were none."""
        if not self._jobs:
            return ""
        table = plain_table(("job", "overrides", "objective", "exit"), self._jobs)
        text = f"lightning-lockstep: the sweep\n{table}"
        left = self.planned[len(self._jobs) :]
        if not left:
            return text
        why = "because ranks that have failed run no further job. To run them:"
        text += f"\n{len(left)} of its {len(self.planned)} jobs were not run, {why}"
        return "\n  ".join([text, *(shlex.join([*self.command, *lines]) for lines in left)])
