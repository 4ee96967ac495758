"""A table of how much memory a model takes under each stage of ZeRO, before anything is started.

``python -m lightning_lockstep.deepspeed.memory_estimate --model-params 7e9 --gpus 8`` prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from lightning_lockstep._tables import plain_table
from lightning_lockstep._text import size_in_words
from lightning_lockstep.deepspeed.memory_formula import BUCKET, PRECISIONS, estimate_memory

__all__ = ["estimate_table", "main"]

_STAGES = (0, 1, 2, 3)


def estimate_table(
    *,
    parameters: int,
    largest_layer: int | None = None,
    ranks: int,
    ranks_per_node: int,
    precision: str = "bf16-mixed",
    optimizer_state_bytes: int = 8,
    bucket: int = BUCKET,
) -> str:
    """Return a table of all stages and ways of offloading; the arguments are those of :func:`estimate_memory`."""
    rows = []
    for stage, optimizer, param in _combinations():
        estimate = estimate_memory(
            parameters=parameters,
            largest_layer=largest_layer,
            ranks=ranks,
            ranks_per_node=ranks_per_node,
            stage=stage,
            offload_optimizer=optimizer,
            offload_param=param,
            precision=precision,
            optimizer_state_bytes=optimizer_state_bytes,
            bucket=bucket,
        )
        sizes = (estimate.device.total, estimate.host.total, estimate.host_at_start, estimate.nvme.total)
        rows.append((stage, optimizer, param, *(size_in_words(size or None) for size in sizes)))
    headings = (
        "stage",
        "offload_optimizer",
        "offload_param",
        "device of a rank",
        "host of a node",
        "host at start",
    )
    return plain_table((*headings, "disk of a node"), rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; the program of ``python -m lightning_lockstep.deepspeed.memory_estimate``."""
    given = _parser().parse_args(argv)
    table = estimate_table(
        parameters=given.model_params,
        largest_layer=given.largest_layer,
        ranks=given.gpus * given.nodes,
        ranks_per_node=given.gpus,
        precision=given.precision,
        optimizer_state_bytes=given.optimizer_state_bytes,
        bucket=given.bucket,
    )
    sys.stdout.write(
        f"{given.model_params:,} parameters on {given.nodes} x {given.gpus} GPUs, {given.precision}\n"
        f"{table}\n"
        "Activations are not included; they grow with the batch size.\n"
    )
    return 0


def _combinations() -> Iterator[tuple[int, str, str]]:
    for stage in _STAGES:
        yield stage, "none", "none"
        if stage:
            yield stage, "cpu", "none"
    yield 3, "cpu", "cpu"
    yield 3, "nvme", "cpu"
    yield 3, "nvme", "nvme"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_lockstep.deepspeed.memory_estimate",
        description="Memory that the states of a model take under each stage of ZeRO.",
    )
    parser.add_argument("--model-params", type=_number, required=True, help="parameters, such as 7e9")
    parser.add_argument("--largest-layer", type=_number, help="parameters of the largest layer (stage 3)")
    parser.add_argument("--gpus", type=_number, required=True, help="ranks on each node")
    parser.add_argument("--nodes", type=_number, default=1)
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16-mixed")
    parser.add_argument(
        "--bucket", type=_number, default=BUCKET, help="DeepSpeed's reduce_bucket_size [elements]"
    )
    parser.add_argument("--optimizer-state-bytes", type=int, default=8, help="for each parameter; Adam has 8")
    return parser


def _number(text: str) -> int:
    value = float(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text}: expected a whole number from 1, such as 7e9")
    return int(value)


if __name__ == "__main__":
    raise SystemExit(main())
