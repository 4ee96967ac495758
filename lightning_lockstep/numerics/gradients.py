"""Gradients looked at in one pass, and which value of a step was the first that is not finite."""

from __future__ import annotations

import cmath
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from lightning_lockstep._doors.torch_internals import non_finite_check
from lightning_lockstep.numerics.statistics import has_bad_values

# -- Which of many steps was the first with a bad value, noted on the device and read now and then --
# For devices whose operations are collected and compiled: a flag that is read in each step would stop each
# step. Here the step itself compares and keeps the number of the first bad one, so that nothing is compiled
# but the step, and one small tensor is read for many of them.


def bad_flag(tensor: Tensor, *, allow_inf: bool = False) -> Tensor:
    """Return whether a tensor holds a nan or an infinity, as a tensor on its device; nothing is read."""
    values = tensor.detach()
    return values.isnan().any() if allow_inf else values.isfinite().all().logical_not()


class FirstBad:
    """The first of the steps noted since :meth:`forget` in which something was bad."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.forget()

    def forget(self) -> None:
        """Start again at step 0."""
        # Copied to the device rather than made there: a constant would be compiled into the first step.
        self.noted = 0
        self._count, self._common, self._here = (
            torch.tensor(value, dtype=torch.int32).to(self._device) for value in (0, -1, -1)
        )
        self._answer: Tensor | None = None
        self._flags: dict[Hashable, Tensor] = {}

    @property
    def found(self) -> Tensor:
        """Whether a step that all ranks know to be bad has been noted, as a tensor on the device."""
        return self._common >= 0

    def note(
        self,
        key: Hashable,  # what the flags are of; steps of one key have as many
        flags: Tensor,  # bool of shape (flags,), of this rank
        *,
        common: Tensor,  # bool without dimensions; bad in a way that all ranks see alike
    ) -> int:
        """Note a step, and return its number."""
        with torch.no_grad():
            before = self._flags.get(key)
            if before is None:
                before = torch.zeros(flags.shape, dtype=torch.bool).to(self._device)
            first = (self._here < 0) & flags.any()
            self._flags[key] = torch.where(first, flags, before)
            self._here = torch.where(first, self._count, self._here)
            self._common = torch.where((self._common < 0) & common, self._count, self._common)
            self._count = self._count + 1
            self._answer = torch.stack([self._common, self._here])
        self.noted += 1
        return self.noted - 1

    def read(self) -> tuple[int | None, int | None]:
        """Return the first step that all ranks know to be bad, and the first that this rank knows to be bad.

        Waits for the last step noted; reads 8 bytes from the device.
        """
        if self._answer is None:
            return None, None
        common, here = self._answer.tolist()
        return (None if common < 0 else common), (None if here < 0 else here)

    def flags_of(self, key: Hashable) -> list[bool]:
        """Return the flags of the first bad step on this rank, whose key this is."""
        return [bool(flag) for flag in self._flags[key].tolist()]


# -- Whether any of many gradients holds a nan or an infinity, found for as little as possible --
# On the CPU neither ``isfinite().all()`` nor an infinity norm is vectorised, and for small tensors a call
# each costs more than reading them. So gradients that share few storages, as DDP's gradients share its
# buckets, are checked storage by storage. For all others the operation with which ``torch.amp.GradScaler``
# unscales gradients takes a whole list in one call, on the CPU and on a GPU, and leaves its answer in a
# tensor, so that nothing waits for it. With a scale of one it leaves the gradients as they are. Copying
# small gradients into one tensor first was measured too: it is slower.

_REFUSED = (RuntimeError, NotImplementedError, TypeError)


class PendingFlag:
    """An answer that may still be on its way from a device."""

    def __init__(
        self,
        flags: Sequence[Tensor],  # of one element; any that is not zero means yes
        known: bool = False,  # whether it is yes already
        confirm: Callable[[], bool] | None = None,  # decides where the flags say yes and may be wrong
    ) -> None:
        self._known, self._confirm = known, confirm
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
        flagged = self._known or any(bool(flag.item()) for flag in self._flags)
        return flagged and (self._confirm is None or self._confirm())


class GradientCheck:
    """Checks many tensors at once. Use one object for each list that is checked again and again."""

    # Sparse gradients, DTensors and others that the fused operation refuses are checked one by one.

    def __init__(self, *, storages: bool = True) -> None:
        self._fused = True
        # Where a shared storage is bad, its tensors decide, as they are when the answer is read.
        self._storages = _SharedStorages() if storages else None

    def start(self, tensors: Sequence[Tensor]) -> PendingFlag:
        """Begin to check, and return at once; the tensors keep their values."""
        shared = [] if self._storages is None else self._storages.of(tensors)
        if not shared:
            return self._check_each(tensors)
        return PendingFlag(
            [flag for flat in shared for flag in flat_flags(flat)],
            confirm=lambda: self._confirm(tensors),
        )

    def _check_each(self, tensors: Sequence[Tensor]) -> PendingFlag:
        if self._fused:
            try:
                return PendingFlag(fused_flags(tensors))
            except _REFUSED:
                # A sparse or otherwise unusual tensor is among them, and will be next time.
                self._fused = False
        return _one_by_one(tensors)

    def _confirm(self, tensors: Sequence[Tensor]) -> bool:
        bad = self._check_each(tensors).result()
        if not bad and self._storages is not None:
            self._storages.note_false_alarm()
        return bad


class _SharedStorages:
    """Finds the few storages that hold many tensors, such as the buckets of DDP's ``gradient_as_bucket_view``.

    They are found again only when the tensors have moved. Nothing is kept alive by it. Tensors that share no
    storages are not looked up more than a few times.
    """

    def __init__(self) -> None:
        self._tries = 4
        self._addresses: list[int] = []
        # Of each storage: index of a tensor in it, its address and its size [bytes].
        self._found: list[tuple[int, int, int]] = []

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return one flat tensor for each storage; together they hold all the tensors. Nothing if there are none."""
        if not self._tries:
            return []
        try:
            addresses = [tensor.data_ptr() for tensor in tensors]
            storages = [tensors[index].untyped_storage() for index, *_ in self._found]
            # Addresses inside storages that are there still belong to these storages.
            same = addresses == self._addresses and all(
                (storage.data_ptr(), storage.nbytes()) == (address, size)
                for storage, (_, address, size) in zip(storages, self._found, strict=True)
            )
            if not same or not self._found:
                self._addresses, self._found = addresses, _shared_storages(tensors)
        except (*_REFUSED, IndexError):  # a sparse tensor has no storage; fewer tensors than last time
            self._addresses, self._found = [], []
        if not self._found:
            self._tries -= 1
        return [
            torch.empty(0, dtype=tensors[i].dtype, device=tensors[i].device).set_(
                tensors[i].untyped_storage()
            )
            for i, *_ in self._found
        ]

    def note_false_alarm(self) -> None:
        """Note that a storage was bad and the tensors were not: too often, and storages are not worth it."""
        self._tries -= 1


def _shared_storages(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Return (index of a tensor in it, address, size [bytes]) of each storage; nothing where they are not few."""
    first: dict[tuple[int, torch.dtype], tuple[int, int, int]] = {}
    used: Counter[tuple[int, torch.dtype]] = Counter()
    for index, tensor in enumerate(tensors):
        if type(tensor) is not Tensor or not tensor.is_floating_point():
            return []
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        first.setdefault(key, (index, storage.data_ptr(), storage.nbytes()))
        used[key] += tensor.nbytes
        if 4 * len(first) > len(tensors):  # not few
            return []
    filled = all(2 * used[key] >= size for key, (_, _, size) in first.items())
    one_dtype = len({address for address, _ in first}) == len(first)
    return list(first.values()) if filled and one_dtype else []


def fused_flags(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return one-element tensors, one for each device, that are not zero when something bad was found."""
    # The tensors are written to, with the values that they have. A RuntimeError says that one is refused.
    found: dict[torch.device, Tensor] = {}
    for group in _groups(tensors):
        device = group[0].device
        if device not in found:
            found[device] = torch.zeros(1, device=device)
        non_finite_check()(group, found[device], _one_on(device))
    return list(found.values())


def flat_flags(flat: Tensor) -> list[Tensor]:
    """Return what :func:`fused_flags` does for a single tensor, on the CPU in less than half the time."""
    if flat.device.type != "cpu":
        return fused_flags([flat])
    # A sum is nan or infinite if anything in it is; where finite numbers add up to that, the exact check decides.
    if cmath.isfinite(flat.sum().item()) or not has_bad_values(flat):
        return []
    return [torch.ones(1)]


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
