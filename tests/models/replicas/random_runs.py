"""Random divergences that must be found and named, and healthy runs that must pass without an alarm."""

from __future__ import annotations

import random
from typing import Any

from lightning_lockstep._text import ranks_in_words
from tests.models.replicas.fits import Case

#: Ranks of these runs: with two nobody can say which one is right; and of those with copies of a divided model.
RANKS, HSDP_RANKS = 3, 4
FAULTS = (
    *("bit", "bit of state", "skipped step", "rate", "buffer", "buffer of integers", "layer", "sampler"),
    "device",
)
#: Parameters of `Net`, in their order.
PARAMETERS = [
    f"{layer}.{kind}" for layer in ("first", "middle.0", "middle.2", "last") for kind in ("weight", "bias")
]
# Kinds of healthy runs, and what makes them.
HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"traits": ("dropout",)},
    "accumulation": {"trainer": {"accumulate_grad_batches": 3}},
    "EMA": {"traits": ("EMA",)},
    "SWA": {"traits": ("SWA",), "samples": 60, "trainer": {"max_epochs": 3}},
    "two optimizers": {"traits": ("two optimizers",), "strategy": {"find_unused_parameters": True}},
    "gradient checkpointing": {"traits": ("checkpointing",)},
    "frozen": {"traits": ("frozen",)},
    "resume": {"traits": ("resume",)},
    "uneven, truncate": {
        "loader": "uneven",
        "strategy": {"uneven_inputs": "truncate"},
        "trainer": {"use_distributed_sampler": False, "max_epochs": 2},
    },
    "uneven, join": {
        "loader": "uneven",
        "strategy": {"uneven_inputs": "join"},
        "trainer": {"use_distributed_sampler": False, "max_epochs": 2},
    },
    "even": {"loader": "stream", "strategy": {"uneven_inputs": "error"}},
    "overfit_batches": {"trainer": {"overfit_batches": 2}, "samples": 24},
    "batchnorm": {"traits": ("batchnorm",)},
    "statistics": {"traits": ("statistics",)},
    "constant": {"loader": "constant"},
    "constant stream": {"loader": "constant stream"},
    "shuffled": {"loader": "shuffled", "samples": 40},
    "one sample": {"samples": 1, "batch": 1},
    "two samples": {"samples": 2, "batch": 1, "loader": "shuffled"},
    "few samples": {"samples": 5, "batch": 2, "loader": "shuffled"},
    "clipping": {"trainer": {"gradient_clip_val": 0.1}},
    "16 bits": {"trainer": {"precision": "bf16-mixed"}},
    "schedule": {"traits": ("schedule",), "samples": 60},
    "compression": {"strategy": {"ddp_comm_hook": "bf16_compress"}},
    "static graph": {"strategy": {"static_graph": True}},
}
# Without options of DDP, averages, data of which ranks get other numbers of batches.
HEALTHY_UNDER_HSDP = (
    *("plain", "dropout", "accumulation", "gradient checkpointing", "frozen", "resume", "overfit_batches"),
    *("batchnorm", "statistics", "constant", "shuffled", "few samples", "clipping", "16 bits", "schedule"),
)


def divergences(count: int, seed: int, *, hsdp: bool = False) -> list[Case]:
    """Return random cases that go wrong on one rank."""
    draw = random.Random(seed)
    faults = FAULTS[:-1] if hsdp else FAULTS  # no rank alone can make a step of a divided model
    ranks = HSDP_RANKS if hsdp else RANKS
    return [
        Case(
            name=f"{number}: {fault}",
            seed=number,
            fault=fault,
            optimizer=draw.choice(("AdamW", "SGD", "Adagrad")),
            traits=("dropout",) if draw.random() < 0.3 else (),
            loader="stream" if fault == "sampler" else "indexed",
            # Else DDP sends rank 0's to all before the next forward.
            strategy={"broadcast_buffers": False} if fault.startswith("buffer") else {},
            rank=draw.randrange(ranks),
            step=draw.randrange(1, 11),
            every=draw.choice((1, 3, 5, 20)),
            target=draw.randrange(1000),
            position=draw.randrange(10_000),
            options={"audit_every_n_steps": draw.choice((1, 3, 5)) if fault == "device" else 0},
            hsdp=hsdp,
        )
        for number in range(count)
        for fault in [faults[number % len(faults)]]
    ]


def healthy(count: int, seed: int, *, hsdp: bool = False) -> list[Case]:
    """Return random cases in which nothing goes wrong."""
    draw = random.Random(seed)
    kinds = [kind for kind in HEALTHY if not hsdp or kind in HEALTHY_UNDER_HSDP]
    return [
        Case(
            name=f"{number}: {kind}",
            seed=number,
            optimizer=draw.choice(("AdamW", "SGD", "Adagrad")),
            every=draw.choice((1, 3, 5)),
            steps=draw.randrange(8, 16),
            options={"audit_every_n_steps": 0 if hsdp else draw.choice((0, 1, 3))},
            hsdp=hsdp,
            **HEALTHY[kind],
        )
        for number in range(count)
        for kind in [kinds[number % len(kinds)]]
    ]


def what_is_wrong(case: Case, outcomes: list[dict[str, Any]]) -> str:
    """Return what a case's outcome lacks, or nothing."""
    errors = {outcome["error"] for outcome in outcomes}
    if len(errors) > 1:
        return f"the ranks did not raise alike: {errors}"
    (error,) = errors
    if not case.fault:
        lines = [line for outcome in outcomes for line in outcome["lines"]]
        return f"a false alarm: {error or lines}" if error or lines else ""
    if error is None:
        return "not found"
    if case.fault == "sampler":
        pair = ranks_in_words([case.rank, (case.rank + 1) % (HSDP_RANKS if case.hsdp else RANKS)])
        return "" if f"{pair} work on the same batches" in error else f"not named: {error}"
    if case.fault == "device":
        return (
            "" if error.startswith(f"rank {case.rank} (host ") and "computes other values" in error else error
        )
    who = f"In the minority: rank {case.rank}."
    if case.hsdp and case.fault in ("bit", "bit of state", "layer"):  # of two, unless the evidence is there
        part = ranks_in_words([case.rank % 2, case.rank % 2 + 2])
        who = f"{part}, which hold the same part of the model, differ in their "
    missing = [text for text in (*expected_names(case), who) if text not in error]
    return f"{missing} not in: {error}" if missing else ""


def expected_names(case: Case) -> list[str]:
    """Return what the report of a case must name."""
    # Of a tensor of one row the second rank of two has nothing.
    parameters = PARAMETERS[:-2] if case.hsdp and case.rank % 2 else PARAMETERS
    if case.fault == "bit":
        return [parameters[case.target % len(parameters)]]
    if case.fault == "bit of state":
        per = {"AdamW": 2, "SGD": 1, "Adagrad": 1}[case.optimizer]
        return [f" of {parameters[case.target % (per * len(parameters)) // per]}"]
    if case.fault == "skipped step":
        return ["An optimizer has stepped on some ranks only"]
    if case.fault == "rate":
        return ["optimizer 0, group 0, lr is "]
    if case.fault == "layer":
        return [PARAMETERS[case.target % 4]]
    return ["scale"] if case.fault == "buffer" else ["batches"]
