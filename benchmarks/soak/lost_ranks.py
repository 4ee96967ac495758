"""Random fits whose ranks kill themselves while the others go on, each compared with an undisturbed one.

python -m benchmarks.soak.lost_ranks --runs 50 --seed 1     # --run SEED: one of them

One to three of four ranks, or of the processes that have taken their places, die in drawn phases of drawn steps. Spare
processes take the places of lost ranks, and processes that are started later join.
The exit code must be 0; weights, samples of each step, validations, logs and checkpoints those of the undisturbed fit.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.random_runs import parse
from tests.models.strategies.outliving import WITH_ALL, Fit, check_same, fit

EPOCHS = 2
#: What the fits of a run are given, each in some of the runs, and how many steps an epoch then has.
OPTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (13, {}),
    "with all": (7, WITH_ALL),
    "global batch": (7, {"global_batch": 31, "random_numbers": "of_sample"}),
    "accumulation": (5, {"accumulate_grad_batches": 3, "val_check_interval": 0.5}),
}
IN_RECOVERY = ("connect", "recovery")


def phases(steps: int) -> dict[str, Sequence[int]]:
    """Return phases of the fit of `outliving_script.py`, each with the steps in which it comes."""
    ends = [steps * number for number in range(1, EPOCHS + 1)]
    return {
        **dict.fromkeys(("forward", "backward", "optimizer"), range(EPOCHS * steps)),
        "save": [*range(5, EPOCHS * steps, 5), *ends],
        **dict.fromkeys(("validation", "validation_end", "epoch_end"), ends),
        "sanity": [0],
        "train_end": ends[-1:],
    }


def draw(seed: int) -> tuple[int, list[str], str]:
    """Return the number of spare processes, who dies where, and which options the fit has, for a seed."""
    draws = random.Random(seed)
    spares, options = draws.choice((0, 0, 1, 2)), draws.choice(["plain", *OPTIONS])
    places = phases(OPTIONS[options][0])
    orders: dict[int, str] = {}  # by step, because a loss that comes again at one step ends the run
    of_ranks = []  # steps in which one of the first ranks dies
    for member in draws.sample(range(4 + spares), draws.randint(1, 3)):
        phase = draws.choice([*places, *(IN_RECOVERY if orders else ())])
        step = 1 if phase in IN_RECOVERY else draws.choice(places[phase])
        at = -1 if phase in IN_RECOVERY else step
        # The others may have made the step in whose optimizer a rank dies, and be in the next one.
        seen_at = {at, at + (phase == "optimizer")}
        if seen_at.isdisjoint(orders):
            orders |= dict.fromkeys(seen_at, f"{member}:{phase}:{step}")
            # In each of the options these come in that step.
            is_sure = member < 4 and phase in ("forward", "backward", "optimizer", "save")
            of_ranks += [step] if is_sure else []
    drawn = list(dict.fromkeys(orders.values()))
    if spares and of_ranks and draws.random() < 0.5:  # the process that is started after the first loss is waited for
        drawn.append(f"{4 + spares}:joins:{min(of_ranks) + 1}")
    return spares, drawn, options


def differs(seed: int, undisturbed: dict[str, Fit], folder: Path) -> str:
    """Do one run; return what is not as it must be."""
    spares, orders, options = draw(seed)
    found = fit(folder / str(seed), "continue", *orders, spares=spares, max_epochs=EPOCHS, **OPTIONS[options][1])
    try:
        check_same(found, undisturbed[options])
    except AssertionError as error:
        return f"{error}\n{found.outcome.output}"
    finally:
        after = [line.partition(" after ")[2].partition(" s;")[0] for line in found.lost()]
        print(
            f"{seed}: {spares} spares, {options}, {' '.join(orders)}: next step after {after} s",
            flush=True,
        )
    return ""


def main() -> int:
    """Do the runs that the command line asks for; the exit code is 1 if one is not as expected."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak.lost_ranks")
    seeds, bad = parse(parser, runs=50).seeds, 0
    with tempfile.TemporaryDirectory(prefix="lost-ranks-") as name:
        folder = Path(name)
        undisturbed = {
            name: fit(folder / name, "end", max_epochs=EPOCHS, **options) for name, (_, options) in OPTIONS.items()
        }
        for seed in seeds:
            if text := differs(seed, undisturbed, folder):
                bad += 1
                print(f"    NOT AS EXPECTED: {text}\n    again: --run {seed}", flush=True)
    print(f"{len(seeds)} runs, {bad} not as expected")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
