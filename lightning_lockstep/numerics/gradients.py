"""One fused look at all gradients: is there a nan or an infinity in any of them?

On the CPU neither ``isfinite().all()`` nor an infinity norm is vectorised, and a call for each tensor costs
more than the reading itself when tensors are small. The operation that ``torch.amp.GradScaler`` uses to
unscale gradients looks at a whole list in one call at memory speed, on the CPU and on a GPU, and leaves its
answer in a tensor, so that nothing waits for it. With a scale of one it leaves the gradients as they are.
Putting small gradients side by side and adding them up was measured too: it is slower.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_lockstep.numerics.statistics import has_bad_values

__all__ = ["GradientCheck", "PendingFlag", "fused_flags"]

_REFUSED = (RuntimeError, NotImplementedError, TypeError)


class PendingFlag:
    """An answer that may still be under way on a device.

    Args:
        flags: One-element tensors; any that is not zero means yes.
        known: An answer that is known already and is yes.
    """

    def __init__(self, flags: Sequence[Tensor], known: bool = False) -> None:
        self._known = known
        self._events: list[torch.cuda.Event] = []
        self._flags: list[Tensor] = [self._to_host(flag) for flag in flags]

    def _to_host(self, flag: Tensor) -> Tensor:
        if flag.device.type != "cuda":
            return flag
        host = torch.empty_like(flag, device="cpu", pin_memory=True)
        host.copy_(flag, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(flag.device))
        self._events.append(event)
        return host

    def result(self) -> bool:
        """Return the answer; on a GPU wait until it is there."""
        for event in self._events:
            event.synchronize()
        return self._known or any(bool(flag.item()) for flag in self._flags)


class GradientCheck:
    """Looks at many tensors at once. Use one for each list that is looked at again and again.

    Sparse gradients, DTensors and others that the fused operation refuses are looked at one by one.
    """

    def __init__(self) -> None:
        self._fused = True

    def start(self, tensors: Sequence[Tensor]) -> PendingFlag:
        """Begin to look, and return at once.

        Args:
            tensors: Floating-point tensors, gradients as a rule. Their values stay as they are.

        Returns:
            The answer, perhaps still under way; on the CPU it is there already.

        Ranks: any rank, alone; nothing is sent and on a GPU nothing is waited for.
        """
        if self._fused:
            try:
                return PendingFlag(fused_flags(tensors))
            except _REFUSED:
                # A sparse or otherwise unusual tensor is among them, and will be next time.
                self._fused = False
        return _one_by_one(tensors)


def fused_flags(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return one-element tensors, one for each device, that are not zero when something bad was found.

    Args:
        tensors: Dense floating-point tensors that may be written to. Their values stay as they are.

    Raises:
        RuntimeError: The fused operation does not take one of them.

    Ranks: any rank, alone; nothing is sent or waited for.
    """
    found: dict[torch.device, Tensor] = {}
    for group in _groups(tensors):
        device = group[0].device
        if device not in found:
            found[device] = torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, found[device], _one_on(device))
    return list(found.values())


_ones: dict[torch.device, Tensor] = {}


def _one_on(device: torch.device) -> Tensor:
    if device not in _ones:
        _ones[device] = torch.ones((), device=device)
    return _ones[device]


def _groups(tensors: Sequence[Tensor]) -> Sequence[list[Tensor]]:
    if tensors and tensors[0].device.type == "cpu":
        # The CPU kernel takes any mixture of dtypes; sorting them would cost more than it does.
        return [list(tensors)]
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.device, tensor.dtype].append(tensor)
    return list(groups.values())


def _one_by_one(tensors: Sequence[Tensor]) -> PendingFlag:
    ordinary = [
        t
        for t in tensors
        if type(t) is Tensor and t.layout is torch.strided and t.is_contiguous() and t.is_floating_point()
    ]
    seen = {id(t) for t in ordinary}
    known = any(has_bad_values(t) for t in tensors if id(t) not in seen)
    return PendingFlag(fused_flags(ordinary), known)
