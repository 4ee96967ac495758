"""The same run on 1, 2 and 4 ranks, with and without accumulation: how far the loss curves are apart."""

from __future__ import annotations

import tempfile

from benchmarks.engine import Report, Table
from tests.harness import run_ranks
from tests.models.batch_size.same_run import GLOBAL_BATCH, SETUPS, STEPS, Variant, curves, largest_difference

VARIANTS = [
    Variant("SGD"),
    Variant("AdamW"),
    Variant("AdamW", pool="average"),
    Variant("SGD", "64-true"),
    Variant("AdamW", "64-true"),
]


def run(quick: bool) -> Report:
    variants, setups = (VARIANTS[:1], SETUPS[:3]) if quick else (VARIANTS, SETUPS)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, micro_batch in setups:
            print(f"{ranks} rank(s), micro-batch {micro_batch}", flush=True)
            arguments = (ranks, micro_batch, variants, folder)
            found[ranks, micro_batch] = run_ranks(ranks, curves, *arguments, backend=None, timeout=240)[0]
    return Report(
        title="The same run on any set-up",
        tables=[_table(index, variant, found) for index, variant in enumerate(variants)],
        notes=[
            f"The demo's network (width 8) on the digits, seed 1, {STEPS} steps, global batch {GLOBAL_BATCH}, one"
            " thread a rank. The loss of a step is the mean over ranks and micro-batches; AdamW's learning rate"
            " is 0.003, SGD's 0.05 with momentum 0.9. Not a measurement of time.",
        ],
    )


def _table(index: int, variant: Variant, found: dict[tuple[int, int], list[list[float]]]) -> Table:
    reference = next(iter(found.values()))[index]
    rows = []
    for (ranks, micro_batch), all_curves in found.items():
        values = all_curves[index]
        shown = [f"{values[step]:.6f}" for step in (0, STEPS // 2 - 1, STEPS - 1)]
        apart = f"{largest_difference(values, reference):.1e}"
        rows.append([str(ranks), str(micro_batch), str(GLOBAL_BATCH // ranks // micro_batch), *shown, apart])
    columns = ["ranks", "micro-batch", "accumulated", "loss at step 1", "10", "20", "largest difference"]
    return Table(str(variant), columns, rows)
