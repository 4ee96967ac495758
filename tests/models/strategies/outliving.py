"""What a fit that has outlived ranks leaves, beside an undisturbed one."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.harness import ScriptOutcome, run_script

SCRIPT = Path(__file__).with_name("outliving_script.py")
LIMIT = 240.0
#: All callbacks, two loggers, dropout and batch norm, whose numbers must not depend on the ranks either.
WITH_ALL: dict[str, Any] = {
    "with_all": True,
    "global_batch": 32,
    "guard": "verify",
    "random_numbers": "of_sample",
    "batch_norm": "of_batch",
}


@dataclass(frozen=True)
class Fit:
    """A fit that has ended, and its folder."""

    folder: Path
    outcome: ScriptOutcome

    @property
    def journal(self) -> list[dict[str, Any]]:
        lines = [line for path in self.folder.glob("journal.*") for line in path.read_text().splitlines()]
        return sorted(map(json.loads, lines), key=lambda one: one["time"])

    def steps(self) -> dict[int, list[int]]:
        """Return the samples of each optimizer step, as the ranks that have made it last had them."""
        found: dict[int, dict[int, dict[int, dict[str, Any]]]] = {}
        for one in self.journal:
            if "step" in one:
                found.setdefault(one["step"], {}).setdefault(one["ranks"], {})[one["rank"]] = one
        samples = {}
        for step, by_ranks in found.items():
            whole = [list(of.values()) for ranks, of in by_ranks.items() if len(of) == ranks]
            if whole:  # else a rank was killed after the step, before its line of it
                last = max(whole, key=lambda of: max(one["time"] for one in of))
                samples[step] = sorted(number for one in last for number in one["seen"])
        return samples

    def validations(self) -> dict[int, float]:
        return {one["validated"]: one["value"] for one in self.journal if "validated" in one}

    def rows(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Return epoch, step and names of each row of metrics.csv, in the one folder of a version."""
        (path,) = self.folder.glob("csv/*/metrics.csv")
        with path.open(newline="") as file:
            rows = [{name: one for name, one in row.items() if one} for row in csv.DictReader(file)]
        # StragglerMonitor compares the ranks anew after a loss, and says so in other steps.
        rows = [row for row in rows if not any(name.startswith("straggler/") for name in row)]
        return sorted((row.get("epoch", ""), row["step"], tuple(sorted(row))) for row in rows)

    def checkpoints(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*.ckpt"))

    def weights(self) -> list[dict[str, torch.Tensor]]:
        return [torch.load(path) for path in sorted(self.folder.glob("final.*.pt"))]

    def lost(self) -> list[str]:
        """Return the last lines of the output that tell of lost ranks."""
        words = " lost at ", " lost in ", " joined at "
        return [line for line in self.outcome.stderr.splitlines() if any(one in line for one in words)]


def fit(folder: Path, on_lost_rank: str, *orders: str, **options: Any) -> Fit:
    """Fit on four ranks, of which some kill themselves: ``member:phase:step``."""
    folder.mkdir(parents=True)
    environment = {"OPTIONS": json.dumps(options), "WORKERS": os.environ.get("WORKERS", "0")}
    command = [str(SCRIPT), str(folder), on_lost_rank, *orders]
    return Fit(folder, run_script(command, env=environment, timeout=LIMIT))


def difference(one: Fit, other: Fit) -> float:
    """Return the largest difference of any weight of any rank that has reached the end."""
    of_other = other.weights()[0]
    return max(float((w[name] - value).abs().max()) for w in one.weights() for name, value in of_other.items())


def check_same(disturbed: Fit, undisturbed: Fit) -> None:
    """Assert that nothing of the loss of ranks is seen in what is left."""
    assert disturbed.outcome.returncode == 0, disturbed.outcome.output
    assert disturbed.outcome.leftovers == ()
    assert difference(disturbed, undisturbed) <= 1e-12
    steps, expected_steps = disturbed.steps(), undisturbed.steps()
    assert steps == {step: samples for step, samples in expected_steps.items() if step in steps}
    assert len(expected_steps) - len(steps) <= len(disturbed.lost())
    values, expected = disturbed.validations(), undisturbed.validations()
    assert values.keys() == expected.keys()
    assert all(abs(values[step] - value) <= 1e-12 for step, value in expected.items())
    assert disturbed.rows() == undisturbed.rows()
    assert disturbed.checkpoints() == undisturbed.checkpoints()
    assert all(one["training"] for one in disturbed.journal if "ended" in one)
    assert not any(one["eval"] for one in disturbed.journal if "starts" in one)
