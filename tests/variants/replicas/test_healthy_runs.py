"""Runs in which nothing goes wrong: whatever a program asks of Lightning, ReplicaCheck gives no alarm."""

from typing import Any

import pytest

from tests.harness import run_ranks
from tests.models.replicas.fits import Case, fit

#: Kinds of runs, and what makes them.
HEALTHY: dict[str, dict[str, Any]] = {
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
    "one sample": {"samples": 1, "batch": 1},
    "few samples": {"samples": 5, "batch": 2, "loader": "shuffled"},
    "clipping": {"trainer": {"gradient_clip_val": 0.1}},
    "16 bits": {"trainer": {"precision": "bf16-mixed"}},
    "schedule": {"traits": ("schedule",), "samples": 60},
    "compression": {"strategy": {"ddp_comm_hook": "bf16_compress"}},
    "static graph": {"strategy": {"static_graph": True}},
}
# Those without options of DDP, averages, and data of which ranks get other numbers of batches.
UNDER_HSDP = (
    *("accumulation", "gradient checkpointing", "frozen", "resume", "overfit_batches", "batchnorm"),
    *("statistics", "constant", "few samples", "clipping", "16 bits", "schedule"),
)


def fits(hsdp: bool) -> dict[str, dict[str, Any]]:
    """Fit one kind after the other, on the same ranks."""
    found = {}
    for number, kind in enumerate(UNDER_HSDP if hsdp else HEALTHY):
        audits = {"audit_every_n_steps": 0 if hsdp else number % 3}
        found[kind] = fit(Case(seed=number, every=2, options=audits, hsdp=hsdp, **HEALTHY[kind]))
    return found


@pytest.mark.parametrize(("ranks", "hsdp"), [(3, False), (4, True)])
def test_healthy_runs_give_no_alarm(ranks: int, hsdp: bool) -> None:
    for found in run_ranks(ranks, fits, hsdp, backend="gloo", timeout=400):
        assert {kind: one for kind, one in found.items() if one["error"] or one["lines"]} == {}
