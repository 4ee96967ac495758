"""Operations that DeepSpeed compiles when they are first used: one rank of a node builds, then the others load."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_lockstep._text import say
from lightning_lockstep.deepspeed.config_parsing import section
from lightning_lockstep.deepspeed.importing import DOCTOR
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.coordination.rank_order import in_rank_order
from lightning_lockstep.errors import LaunchError

# Types of DeepSpeed's optimizers, with the builder of the op that each needs on the device, and where it is offloaded.
_BUILDERS = {
    "adagrad": (None, "CPUAdagradBuilder"),
    "adam": ("FusedAdamBuilder", "CPUAdamBuilder"),
    "adamw": ("FusedAdamBuilder", "CPUAdamBuilder"),
    "lamb": ("FusedLambBuilder", "FusedLambBuilder"),
    "lion": ("FusedLionBuilder", "CPULionBuilder"),
    "muon": (None, "CPUAdamBuilder"),
}
# A build that takes longer is announced [s].
_QUICK = 3.0
# Lines of a failed build that are shown.
_SHOWN = 6


def needed_builders(config: Mapping[str, Any]) -> list[str]:
    """Return the builders of the ops without which a fit with this configuration cannot begin."""
    optimizer, zero = section(config, "optimizer"), section(config, "zero_optimization")
    devices = [section(zero, name).get("device") for name in ("offload_optimizer", "offload_param")]
    on_device, offloaded = _BUILDERS.get(str(optimizer.get("type")).lower(), (None, None))
    if section(optimizer, "params").get("torch_adam") is True:
        on_device = offloaded = None
    builder = offloaded if devices[0] in ("cpu", "nvme") else on_device
    return [*([builder] if builder else []), *(["AsyncIOBuilder"] if "nvme" in devices else [])]


def load_ops(builders: Sequence[str], timeout: float) -> None:
    """Load ops, on each node one rank after the other, of which the first builds them; ranks: all, together."""
    if not builders:
        return
    # No collective is open while a rank builds, and if it fails there the other ranks are told and do not try.
    with in_rank_order(per_node=True, timeout=timeout):
        for builder in builders:
            _load(builder)


def _load(builder: str) -> None:
    from deepspeed.accelerator import get_accelerator

    communicator, op = current_communicator(), get_accelerator().create_op_builder(builder)
    who = f"rank {communicator.rank} on {communicator.host}"
    if op is None:
        raise LaunchError(f"DeepSpeed's accelerator {get_accelerator().device_name()!r} has no {builder}.")
    text = (
        f"lightning-lockstep: {who} builds DeepSpeed's op {op.name}, or waits for another build of it. If none runs,"
        " `lockstep-doctor deepspeed` says how to go on."
    )
    announcement = threading.Timer(_QUICK, say, [text])
    announcement.daemon = True
    announcement.start()
    try:
        op.load(verbose=False)
    except Exception as error:  # of a compiler, of the loader, of DeepSpeed
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "undefined reference" in line]
        shown = "\n  ".join((telling or lines)[:_SHOWN])
        what = f"could not build DeepSpeed's op {op.name} ({type(error).__name__})"
        raise LaunchError(f"{who} {what}:\n  {shown}\nFix it with: {DOCTOR}") from error
    finally:
        announcement.cancel()
