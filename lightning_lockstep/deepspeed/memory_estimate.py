"""How much memory the states of a model take under each stage of ZeRO, for the doctor's ``--model-parameters``."""

from __future__ import annotations

from lightning_lockstep._text import plain_table, size_in_words

# DeepSpeed's defaults, in elements.
_BUCKET = 500_000_000  # reduce_bucket_size
_SUB_GROUP = 1_000_000_000  # sub_group_size
_SWAP_BUFFERS = 4  # offload_optimizer.buffer_count
_PARAM_BUFFERS = 5 * 100_000_000  # offload_param: buffer_count times buffer_size

# Stage, offload_optimizer, offload_param.
_ROWS = (
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "cpu", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)

# With P parameters in bf16-mixed under Adam, N ranks, and L parameters in the largest layer (a twentieth of P), a rank
# has [bytes]:
#
#     part             stage 0     stage 1       stage 2       stage 3       where, if offloaded
#     weights          2 P         2 P           2 P           2 P / N       offload_param
#     gradients        2 P + 4 P   2 P + 4 P/N   6 P/N         6 P/N         offload_optimizer, see below
#     master weights   4 P         4 P / N       4 P / N       4 P / N       offload_optimizer
#     optimizer state  8 P         8 P / N       8 P / N       8 P / N       offload_optimizer
#     buffers          -           2 B           2 B           2 B           stay on the device
#     largest layer    -           -             -             4 L           stays on the device
#
# B is ``reduce_bucket_size``: DeepSpeed allocates all of it, however small the model. The 4 bytes of a gradient are the
# float32 copy that the optimizer reads; stage 3 makes it for one sub-group at a time. Offloading the optimizer leaves
# the 2 P of stage 1 on the device, and of stages 2 and 3 nothing; the host gets 4 P/N, and 2 P/N to send new weights
# or gradients through. With ``nvme`` the host holds buffers for each rank.
#
# Not counted: activations, which grow with the batch and are often the most; layers that stage 3 keeps or fetches
# ahead; what CUDA and NCCL take (1 to 2 GiB). DeepSpeed's own estimators know neither stages 0 and 1 nor NVMe.


def estimate_table(parameters: int, ranks: int, ranks_per_node: int) -> str:
    """Return a table of all stages and ways of offloading."""
    rows = []
    for stage, optimizer, param in _ROWS:
        device, host, disk = _of_rank(parameters, ranks, stage, optimizer, param)
        # While the ranks build the model each has a float32 copy, in stage 3 of the largest layer.
        start = 4 * (_largest(parameters) if stage == 3 else parameters)
        of_node = (ranks_per_node * size for size in (host, start, disk))
        rows.append((stage, optimizer, param, *(size_in_words(size or None) for size in (device, *of_node))))
    places = ("device of a rank", "host of a node", "host at start", "disk of a node")
    return plain_table(("stage", "offload_optimizer", "offload_param", *places), rows)


def _largest(parameters: int) -> int:
    return max(1, parameters // 20)


def _of_rank(parameters: int, ranks: int, stage: int, optimizer: str, param: str) -> tuple[int, int, int]:
    """Return what a rank has on its device, in the memory of its host and on its disk [bytes]."""

    def share(size: int) -> int:
        return -(-parameters * size // ranks)

    def part(size: int, first: int) -> int:
        """Return bytes that are divided from a stage on."""
        return share(size) if stage >= first else size * parameters

    sub_group = min(share(4), 4 * _SUB_GROUP)
    weights, gradients = part(2, 3), part(2, 2) + (sub_group if stage == 3 else part(4, 1))
    states = part(4, 1) + part(8, 1)
    buffers = (2 * _BUCKET if stage else 0) + (4 * _largest(parameters) if stage == 3 else 0)
    away = {"none": 0, "cpu": 0, "nvme": 0}
    if optimizer != "none":
        away[optimizer] += states + share(4)
        away["cpu"] += share(2) + (_SWAP_BUFFERS * sub_group if optimizer == "nvme" else 0)
        states, gradients = 0, 2 * parameters if stage == 1 else 0
    if param != "none":
        away[param] += weights
        away["cpu"] += 2 * _PARAM_BUFFERS if param == "nvme" else 0
        weights = 0
    return weights + gradients + states + buffers, away["cpu"], away["nvme"]
