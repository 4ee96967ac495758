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

    @property
    def host_peak(self) -> int:
        """The most a node needs at once [bytes]."""
        return max(self.host.total, self.host_at_start)


def estimate_memory(
    *,
    parameters: int,
    largest_layer: int | None = None,  # parameters of it, for stage 3; None: a twentieth of the model
    ranks: int,
    ranks_per_node: int,
    stage: int,
    offload_optimizer: str = "none",  # none, cpu or nvme: where gradients, master weights and state go
    offload_param: str = "none",  # likewise the weights that are not used; stage 3 only
    precision: str = "bf16-mixed",  # Lightning's name
    optimizer_state_bytes: int = 8,  # a parameter: 8 for Adam, 4 for SGD with momentum, 0 for plain SGD
    bucket: int = BUCKET,  # DeepSpeed's reduce_bucket_size [elements]
) -> MemoryEstimate:
    """Return how much memory the states of a model take."""
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
    layer = max(1, parameters // 20) if largest_layer is None else largest_layer
    faults = Faults("estimate_memory")
    faults.whole("parameters", parameters)
    faults.whole("largest_layer", layer)
    faults.whole("ranks", ranks)
    faults.whole("ranks_per_node", ranks_per_node)
    faults.whole("bucket", bucket)
    faults.whole("optimizer_state_bytes", optimizer_state_bytes, least=0)
    faults.choice("stage", stage, _STAGES)
    faults.choice("precision", precision, list(_BYTES))
    faults.choice("offload_optimizer", offload_optimizer, _PLACES)
    faults.choice("offload_param", offload_param, _PLACES)
    faults.raise_all()
    least = {"none": 0, "cpu": 1, "nvme": 3}[offload_optimizer]
    expected = f"stage {least} or higher for offload_optimizer={offload_optimizer!r}"
    faults.check(stage >= least, "stage", stage, expected)
    faults.check(
        offload_param == "none" or stage == 3, "stage", stage, f"3 for offload_param={offload_param!r}"
    )
    faults.check(ranks % ranks_per_node == 0, "ranks", ranks, f"a multiple of {ranks_per_node}")
    faults.check(layer <= parameters, "largest_layer", layer, "part of the parameters")
    faults.raise_all()

    def share(size: int) -> int:
        """Return the bytes of a rank's partition of all parameters, ``size`` bytes each."""
        return -(-parameters * size // ranks)

    size = _BYTES[precision]
    whole, copy, sub_group = size * parameters, share(_FLOAT32), min(share(_FLOAT32), _FLOAT32 * _SUB_GROUP)
    if stage == 0:
        copies = _FLOAT32 * parameters if size < _FLOAT32 else 0
        device = MemoryParts(whole, whole + copies, copies, optimizer_state_bytes * parameters)
    else:
        device = MemoryParts(
            weights=share(size) if stage == 3 else whole,
            gradients=(whole if stage == 1 else share(size)) + (sub_group if stage == 3 else copy),
            master_weights=copy,
            optimizer_state=share(optimizer_state_bytes),
            buffers=size * bucket,
            largest_layer=2 * size * layer if stage == 3 else 0,
        )
    host, nvme = MemoryParts(), MemoryParts()
    places = {"cpu": host, "nvme": nvme}
    if offload_optimizer != "none":
        away = places[offload_optimizer]
        away.master_weights, device.master_weights = device.master_weights, 0
        away.optimizer_state, device.optimizer_state = device.optimizer_state, 0
        away.gradients, device.gradients = copy, whole if stage == 1 else 0
        if stage == 3:
            host.gradients += share(size)
        else:
            host.buffers += share(size)
        if offload_optimizer == "nvme":
            host.buffers += _SWAP_BUFFERS * sub_group
    if offload_param != "none":
        places[offload_param].weights, device.weights = device.weights, 0
        if offload_param == "nvme":
            host.buffers += size * _PARAM_BUFFERS

    def of_node(parts: MemoryParts) -> MemoryParts:
        return MemoryParts(**{name: ranks_per_node * size for name, size in vars(parts).items()})

    at_start = _FLOAT32 * (layer if stage == 3 else parameters) * ranks_per_node
    return MemoryEstimate(device, of_node(host), of_node(nvme), at_start)


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
