"""A table of how much memory a model takes under each stage of ZeRO, before anything is started.

``python -m lightning_lockstep.deepspeed.memory_estimate --model-params 7e9 --gpus 8`` prints it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_lockstep._settings import Faults
from lightning_lockstep._text import plain_table, size_in_words

# Bytes of a weight and of its gradient while the model computes.
_BYTES = {"16-mixed": 2, "16-true": 2, "bf16-mixed": 2, "bf16-true": 2, "32-true": 4}
_FLOAT32 = 4
# DeepSpeed's defaults, in elements.
BUCKET = 500_000_000  # reduce_bucket_size
_SUB_GROUP = 1_000_000_000  # sub_group_size
_SWAP_BUFFERS = 4  # offload_optimizer.buffer_count
_PARAM_BUFFERS = 5 * 100_000_000  # offload_param: buffer_count times buffer_size

_STAGES = (0, 1, 2, 3)
_PLACES = ("none", "cpu", "nvme")


@dataclass
class MemoryParts:
    """Memory by what lies in it [bytes]."""

    weights: int = 0  # that the model computes with
    gradients: int = 0  # and the float32 copies that the optimizer reads
    master_weights: int = 0  # of float32, which the optimizer changes
    optimizer_state: int = 0  # such as Adam's two moments
    buffers: int = 0  # of the reduction of gradients, and of what moves between device, host and disk
    largest_layer: int = 0  # weights and gradients of it, gathered from all ranks (stage 3)

    @property
    def total(self) -> int:
        """All of them [bytes]."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class MemoryEstimate:
    """What :func:`estimate_memory` returns."""

    device: MemoryParts  # of each rank
    host: MemoryParts  # of each node, for all its ranks
    nvme: MemoryParts  # of each node, for all its ranks
    # Of a node while its ranks build the model: a float32 copy each, in stage 3 of the largest layer [bytes].
    host_at_start: int


# -- What the states of a model take in a run --
# With P parameters, N ranks, n of them on a node, b bytes of a weight in the precision (2 or 4), L
# parameters in the largest layer and s bytes of optimizer state for each parameter, a rank has [bytes]::
#
#     part             stage 0          stage 1       stage 2       stage 3       where, if offloaded
#     weights          b P              b P           b P           b P / N       offload_param
#     gradients        b P + 4 P        b P + 4 P/N   (b + 4) P/N   (b + 4) P/N   offload_optimizer, see below
#     master weights   4 P (0 if b=4)   4 P / N       4 P / N       4 P / N       offload_optimizer
#     optimizer state  s P              s P / N       s P / N       s P / N       offload_optimizer
#     buffers          -                b B           b B           b B           stay on the device
#     largest layer    -                -             -             2 b L         stays on the device
#
# B is ``reduce_bucket_size``: DeepSpeed allocates all of it, however small the model; ``overlap_comm``
# doubles it, which is not counted. The 4 bytes of a gradient are the float32 copy that the optimizer
# reads; without offloading it lives during the step only and at stage 3 is made for one sub-group (10^9
# parameters) at a time. In float32 (b=4) stage 0 has neither such a copy nor master weights; ZeRO has
# both all the same.
#
# Offloading the optimizer leaves the b P of stage 1 on the device, and of stages 2 and 3 nothing; the
# host gets 4 P/N, at stages 1 and 2 a buffer of b P/N to send the new weights through, at stage 3 the
# gradients of b bytes too. Host and disk hold what all ranks of a node give them. With ``nvme`` the host
# holds buffers for each rank: four times a sub-group in float32 for the optimizer, 5 x 10^8 weights for
# the parameters.
#
# Not counted: activations, which grow with the batch and are often the most; layers that stage 3 keeps or
# fetches ahead (``stage3_max_live_parameters``, up to b x 10^9 bytes); what CUDA and NCCL take (1 to 2
# GiB); fragments.
#
# DeepSpeed's own estimators know neither stages 0 and 1 nor NVMe nor float32, leave out the gradients of
# 16 bits in stage 3, and count the ranks of all nodes for the host of each.


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What :func:`estimate_memory` is given, checked."""

    parameters: int
    largest_layer: int | None = None  # parameters of it, for stage 3; None: a twentieth of the model
    ranks: int
    ranks_per_node: int
    stage: int
    offload_optimizer: str = "none"  # none, cpu or nvme: where gradients, master weights and state go
    offload_param: str = "none"  # likewise the weights that are not used; stage 3 only
    precision: str = "bf16-mixed"  # Lightning's name
    optimizer_state_bytes: int = 8  # a parameter: 8 for Adam, 4 for SGD with momentum, 0 for plain SGD
    bucket: int = BUCKET  # DeepSpeed's reduce_bucket_size [elements]

    def __post_init__(self) -> None:
        faults, given = Faults("estimate_memory"), {**vars(self), "largest_layer": self.layer}
        for name in ("parameters", "largest_layer", "ranks", "ranks_per_node", "bucket"):
            faults.whole(name, given[name])
        faults.whole("optimizer_state_bytes", self.optimizer_state_bytes, least=0)
        faults.choice("stage", self.stage, _STAGES)
        faults.choice("precision", self.precision, list(_BYTES))
        faults.choice("offload_optimizer", self.offload_optimizer, _PLACES)
        faults.choice("offload_param", self.offload_param, _PLACES)
        faults.raise_all()
        least = {"none": 0, "cpu": 1, "nvme": 3}[self.offload_optimizer]
        expected = f"stage {least} or higher for offload_optimizer={self.offload_optimizer!r}"
        faults.check(self.stage >= least, "stage", self.stage, expected)
        expected = f"3 for offload_param={self.offload_param!r}"
        faults.check(self.offload_param == "none" or self.stage == 3, "stage", self.stage, expected)
        expected = f"a multiple of {self.ranks_per_node}"
        faults.check(self.ranks % self.ranks_per_node == 0, "ranks", self.ranks, expected)
        faults.check(self.layer <= self.parameters, "largest_layer", self.layer, "part of the parameters")
        faults.raise_all()

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        return max(1, self.parameters // 20) if self.largest_layer is None else self.largest_layer

    def share(self, size: int) -> int:
        """Return the bytes of a rank's partition of all parameters, ``size`` bytes each."""
        return -(-self.parameters * size // self.ranks)

    @property
    def sub_group(self) -> int:
        """Bytes of the largest sub-group of a rank's partition in float32."""
        return min(self.share(_FLOAT32), _FLOAT32 * _SUB_GROUP)

    def on_device(self) -> MemoryParts:
        """Return what a rank's device holds where nothing is offloaded."""
        size, copy = _BYTES[self.precision], self.share(_FLOAT32)
        whole = size * self.parameters
        if self.stage == 0:
            copies = _FLOAT32 * self.parameters if size < _FLOAT32 else 0
            return MemoryParts(whole, whole + copies, copies, self.optimizer_state_bytes * self.parameters)
        return MemoryParts(
            weights=self.share(size) if self.stage == 3 else whole,
            gradients=(whole if self.stage == 1 else self.share(size))
            + (self.sub_group if self.stage == 3 else copy),
            master_weights=copy,
            optimizer_state=self.share(self.optimizer_state_bytes),
            buffers=size * self.bucket,
            largest_layer=2 * size * self.layer if self.stage == 3 else 0,
        )

    def offload(self, device: MemoryParts) -> tuple[MemoryParts, MemoryParts]:
        """Take from a rank's device what is offloaded; return what its host and its disk hold instead."""
        size, host, nvme = _BYTES[self.precision], MemoryParts(), MemoryParts()
        places = {"cpu": host, "nvme": nvme}
        if self.offload_optimizer != "none":
            away = places[self.offload_optimizer]
            away.master_weights, device.master_weights = device.master_weights, 0
            away.optimizer_state, device.optimizer_state = device.optimizer_state, 0
            away.gradients = self.share(_FLOAT32)
            device.gradients = size * self.parameters if self.stage == 1 else 0
            if self.stage == 3:
                host.gradients += self.share(size)
            else:
                host.buffers += self.share(size)
            if self.offload_optimizer == "nvme":
                host.buffers += _SWAP_BUFFERS * self.sub_group
        if self.offload_param != "none":
            places[self.offload_param].weights, device.weights = device.weights, 0
            if self.offload_param == "nvme":
                host.buffers += size * _PARAM_BUFFERS
        return host, nvme


def estimate_memory(**given: Any) -> MemoryEstimate:
    """Return how much memory the states of a model take; the arguments are the fields of :class:`_Run`."""
    run = _Run(**given)
    device = run.on_device()
    host, nvme = (
        MemoryParts(**{name: run.ranks_per_node * size for name, size in vars(parts).items()})
        for parts in run.offload(device)
    )
    at_start = _FLOAT32 * (run.layer if run.stage == 3 else run.parameters) * run.ranks_per_node
    return MemoryEstimate(device, host, nvme, at_start)


def estimate_table(**model: Any) -> str:
    """Return a table of all stages and ways of offloading; the arguments are the others of :func:`estimate_memory`."""
    rows = []
    for stage, optimizer, param in _combinations():
        estimate = estimate_memory(stage=stage, offload_optimizer=optimizer, offload_param=param, **model)
        sizes = (estimate.device.total, estimate.host.total, estimate.host_at_start, estimate.nvme.total)
        rows.append((stage, optimizer, param, *(size_in_words(size or None) for size in sizes)))
    places = ("device of a rank", "host of a node", "host at start", "disk of a node")
    return plain_table(("stage", "offload_optimizer", "offload_param", *places), rows)


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
    parser.add_argument("--precision", choices=list(_BYTES), default="bf16-mixed")
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
