"""One fused look at all gradients: is there a nan or an infinity in any of them?

On the CPU neither ``isfinite().all()`` nor an infinity norm is vectorised, and a call for each tensor costs
more than the reading itself when tensors are small. The operation that ``torch.amp.GradScaler`` uses to
unscale gradients looks at a whole list in one call at memory speed, on the CPU and on a GPU, and leaves its
answer in a tensor, so that nothing waits for it. With a scale of one it leaves the gradients as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_lockstep.numerics.statistics import has_bad_values

__all__ = ["GradientCheck", "PendingFlag"]


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

    def ready(self) -> bool:
        """Return whether :meth:`result` would not have to wait."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def result(self) -> bool:
        """Return the answer; on a GPU wait until it is there."""
        for event in self._events:
            event.synchronize()
        return self._known or any(bool(flag.item()) for flag in self._flags)


class GradientCheck:
    """Looks at many tensors in one pass for each device and dtype.

    Sparse gradients, DTensors and others that the fused operation refuses are looked at one by one.
    """

    def __init__(self) -> None:
        self._one: dict[torch.device, Tensor] = {}
        self._fused = True

    def start(self, tensors: Iterable[Tensor]) -> PendingFlag:
        """Begin to look, and return at once.

        Args:
            tensors: Floating-point tensors, gradients as a rule. Their values stay as they are.

        Returns:
            The answer, perhaps still under way.

        Ranks: any rank, alone; nothing is sent and on a GPU nothing is waited for.
        """
        tensors = list(tensors)
        if not tensors:
            return PendingFlag(())
        if self._fused:
            try:
                return PendingFlag(self.flags(tensors))
            except (RuntimeError, NotImplementedError, TypeError):
                # A sparse or otherwise unusual tensor is among them, and will be next time.
                self._fused = False
        ordinary = [
            t for t in tensors if type(t) is Tensor and t.layout is torch.strided and t.is_contiguous()
        ]
        seen = {id(t) for t in ordinary}
        known = any(has_bad_values(t) for t in tensors if id(t) not in seen)
        return PendingFlag(self.flags(ordinary), known)

    def flags(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return one-element tensors, one for each device, that are not zero when something bad was found.

        Args:
            tensors: Dense floating-point tensors.

        Ranks: any rank, alone; nothing is sent or waited for.
        """
        found: dict[torch.device, Tensor] = {}
        for group in self._groups(tensors):
            device = group[0].device
            if device not in found:
                found[device] = torch.zeros(1, device=device)
            if device not in self._one:
                self._one[device] = torch.ones((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found[device], self._one[device])
        return list(found.values())

    @staticmethod
    def _groups(tensors: Sequence[Tensor]) -> Iterable[list[Tensor]]:
        if not tensors:
            return []
        if tensors[0].device.type == "cpu":
            # The CPU kernel takes any mixture of dtypes; sorting them would cost more than it does.
            return [list(tensors)]
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            groups[tensor.device, tensor.dtype].append(tensor)
        return groups.values()
