"""What the parts cost, as ratios read from benchmarks/results: for the README's table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.engine import MIDDLE_HALF, Spread

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True)
class Cost:
    """A row: what is compared with which peer, and where it was measured."""

    what: str
    peer: str
    topic: str
    table: str  # its heading in results/<topic>.md
    variant: str


def measured(cost: Cost) -> tuple[Spread, str]:
    """The ratio as the page of results has it, and what stands there of the rounds, such as ``middle half``."""
    page = (RESULTS / f"{cost.topic}.md").read_text()
    head, _, rest = page.partition(f"\n## {cost.table}\n")
    if not rest or not head:
        raise LookupError(f"results/{cost.topic}.md has no table {cost.table!r}")
    shown = ""
    for line in rest.split("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "variant":
            shown = cells[3]
        if cells[0] == cost.variant and len(cells) == 6:
            low, high = cells[3].split(" to ")
            return Spread(float(cells[2]), float(low), float(high)), shown
    raise LookupError(f"results/{cost.topic}.md, table {cost.table!r}: no ratio of {cost.variant!r}")


def ratio(value: float) -> str:
    """A ratio in two digits after the point, a small one in three."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def line(cost: Cost) -> str:
    """The row of the README's table."""
    spread, shown = measured(cost)
    figures = f"{ratio(spread.median)} | {ratio(spread.low)} to {ratio(spread.high)}"
    figures += "" if shown == MIDDLE_HALF else f" ({shown})"
    return f"| {cost.what} | {cost.peer} | {figures} | [{cost.topic}](benchmarks/results/{cost.topic}.md) |"


_CHECK = "a check of it, with Adam's state"
_T5 = "T5 9.4 M, batch 8 x 64, AdamW, 2 threads"
COSTS = [
    Cost(
        "a step with `lockstep_ddp`, 10 M parameters",
        "`ddp`",
        "step",
        "10 M parameters, batch 32 per rank, 1 thread per rank in both",
        "lockstep_ddp",
    ),
    Cost(
        "an all-reduce with `guard=verify`",
        "torch's `DETAIL`",
        "verify",
        "all_reduce, 2 ranks, a process each time",
        "verify",
    ),
    Cost(
        "a step with `lockstep_fsdp`, 10 M parameters",
        "a `fully_shard` loop",
        "fsdp",
        "step, 10.5 M parameters, 4 x 32 bytes per rank, 1 thread",
        "lockstep_fsdp",
    ),
    Cost(
        "one of 4 ranks killed: next step",
        "torchrun's restart",
        "recovery",
        "rank 2 killed in step 80: from the kill to the next step",
        "ours",
    ),
    Cost(
        "one check of `ReplicaCheck`, T5",
        "a step",
        "replica_check",
        "one check, T5 9.4 M, batch 8 x 64",
        _CHECK,
    ),
    Cost("a step with `OverflowDetector`, T5", "no detector", "overflow", _T5, "replay"),
    Cost(
        "the same with Transformers' detector",
        "no detector",
        "overflow",
        f"{_T5}: what there was",
        "Transformers' detector",
    ),
    Cost(
        "a search with `AutoBatchSize`, simulated memory",
        "`BatchSizeFinder`",
        "batch_size",
        "time of a search, simulated wall at 600",
        "AutoBatchSize",
    ),
]
