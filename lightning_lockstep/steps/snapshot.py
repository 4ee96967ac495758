"""The state of a run, saved and restored exactly: random numbers, attributes, weights, optimizers."""

from __future__ import annotations

import random
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, Sampler

# -- Global random generators, seeded by whole numbers that a hash makes of others, and left as they were --

_MASK = (1 << 64) - 1
#: Of SplitMix64: https://prng.di.unimi.it/splitmix64.c
FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(*parts: int) -> int:
    z = 0x9E3779B97F4A7C15
    for part in parts:
        z = ((z ^ (part & _MASK)) * FACTORS[0]) & _MASK
        z ^= z >> 29
        z = (z * FACTORS[1]) & _MASK
        z ^= z >> 32
    return z


def seed_generators(key: int) -> None:
    """Seed the global generators of torch (on the CPU), Python and numpy, within :func:`kept_generators`."""
    torch.default_generator.manual_seed(key)  # 1 us; `torch.manual_seed` takes 150
    random.seed(key)
    numpy.random.seed(key & 0xFFFFFFFF)


class OwnNumbers:
    """Random numbers of a seed, which the global generators of torch (on the CPU), Python and numpy give in `used`."""

    def __init__(self, seed: int = 0) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = numpy.random.MT19937(seed)
        self.is_used = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw these numbers in the body, each time the next ones, and leave the generators as they were."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        self.is_used = not self.is_used
        # numpy's whole bit generator is exchanged, because copying its state is slow. Only the second of a pair of
        # normal numbers, which numpy keeps elsewhere, is lost.
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_bit_generator()  # type: ignore[attr-defined]
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        numpy.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        self._torch, self._python, self._numpy = before


_numbers = OwnNumbers()  # because to make numpy's takes half a millisecond


def kept_generators() -> AbstractContextManager[None]:
    """Restore the global generators of torch (on the CPU), Python and numpy after the body, which seeds them."""
    return (OwnNumbers() if _numbers.is_used else _numbers).used()


@contextmanager
def torch_seeded(key: int) -> Iterator[None]:
    """Let torch draw the same numbers on all ranks in the body, on this rank's GPU too, and restore its generators."""
    devices = [] if gpu_state() is None else [torch.cuda.current_device()]
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(key)
        if devices:
            torch.cuda.manual_seed(key)
        yield


def gpu_state() -> Any:
    """Return the state of this rank's generator on its GPU, which is on the host; ``None`` without a GPU in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # `is_available` asks the driver each time
        return None
    return torch.cuda.get_rng_state()


def set_gpu_state(state: Any) -> None:
    if state is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.set_rng_state(state)


# -- The state of every random number generator that a training step may draw from --

_ASKED = "source", "_loader", "sampler", "batch_sampler"  # what a loader or a sampler asks


def generators_of(*holders: Any) -> list[torch.Generator]:
    """Return the generators of loaders and samplers, and of what they ask."""
    found, seen = list[torch.Generator](), list(holders)
    for holder in seen:  # the list grows during the loop
        # A loader of the program's own may show these by properties, such as those of a loader that it wraps.
        shown = {name: getattr(holder, name, None) for name in ("generator", "dataset", *_ASKED)}
        for name, value in {**getattr(holder, "__dict__", {}), **shown}.items():
            into: list[Any] | None = found if isinstance(value, torch.Generator) else None
            is_asked = name in _ASKED and value is not None
            into = seen if isinstance(value, (Sampler, IterableDataset)) or is_asked else into
            if into is not None and not any(value is one for one in into):
                into.append(value)
    return found


def _states(others: Iterable[torch.Generator]) -> list[Any]:
    of_numpy = numpy.random.get_state(legacy=False)  # of any bit generator
    return [torch.get_rng_state(), random.getstate(), of_numpy, *(one.get_state() for one in others)]


def random_states(others: Iterable[torch.Generator] = ()) -> list[Any]:
    """Return the states of the global generators of torch (CPU), Python and numpy, and of others, as plain data."""
    of_torch, of_python, of_numpy, *own = _states(others)
    return [of_torch, of_python, apply_to_collection(of_numpy, numpy.ndarray, numpy.ndarray.tolist), *own]


def set_random_states(states: Sequence[Any], others: Iterable[torch.Generator] = ()) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    for generator, state in zip(others, states[3:], strict=False):
        generator.set_state(state)


class RandomState:
    """State of the global generators of torch (CPU and GPU), Python and numpy, and of given ones of torch."""

    def __init__(self, others: Iterable[torch.Generator] = ()) -> None:
        # Nothing is read from a device.
        self._others = list(others)
        self._states, self._gpu = _states(self._others), gpu_state()

    def restore(self) -> None:
        set_random_states(self._states, self._others)
        set_gpu_state(self._gpu)


# -- Attributes of objects that a training step may change, restored in the objects that held them --

_HELD = Tensor, list, set, dict


class Attributes:
    """Attributes of objects, with what tensors, lists, sets and dictionaries among them hold."""

    # Containers and tensors are restored in place, because other objects may refer to them.

    def __init__(
        self,
        owners: Iterable[object],
        *,
        but: Collection[str] = (),  # names of attributes that are left as they are
        leaves: Iterable[Tensor] = (),  # tensors that are left as they are
    ) -> None:
        self._but, known = but, {id(tensor) for tensor in leaves}
        self._kept = [
            (held, {name: restorer(value, known) for name, value in held.items() if name not in but})
            for held in map(vars, owners)
        ]

    def restore(self) -> None:
        for attributes, kept in self._kept:
            for name in [name for name in attributes if name not in kept and name not in self._but]:
                del attributes[name]
            for name, put_back in kept.items():
                attributes[name] = put_back()


class ModuleAttributes(Attributes):
    """Plain attributes of a module and its submodules: modes, counters, lists, states of torchmetrics."""

    # A step never replaces parameters or modules, buffers have copies of their own, and the rest is Lightning's.
    _OTHERS = frozenset({"_parameters", "_modules", "_trainer", "_fabric", "trainer"})

    def __init__(self, module: nn.Module) -> None:
        # An engine that divides parameters also keeps them in containers, and may change there what they hold.
        leaves = [*module.parameters(), *module.buffers()]
        super().__init__(module.modules(), but=self._OTHERS, leaves=leaves)


def restorer(value: Any, known: set[int] | None = None) -> Callable[[], Any]:
    """Return a function that returns the same object with the contents that it has now."""
    # `known`: ids of objects that are left as they are.
    known = set() if known is None else known
    if not isinstance(value, _HELD) or id(value) in known:
        return lambda: value
    if isinstance(value, Tensor):
        return partial(_with_values, value, value.detach().cpu().clone())
    known.add(id(value))
    items = dict(value) if isinstance(value, dict) else list(value)
    numbered = items.items() if isinstance(items, dict) else enumerate(items)
    inner = {key: restorer(item, known) for key, item in numbered if isinstance(item, _HELD)}
    return partial(_refill, value, items, inner)


def _with_values(tensor: Tensor, values: Tensor) -> Tensor:
    if tensor.is_inference():
        return values.to(tensor.device)
    # Writing raises the version counter, and autograd would refuse a later backward that needs the tensor.
    is_dense = tensor.layout is torch.strided  # torch does not compare others
    if not is_dense or not torch.equal(tensor.detach().to(values.device), values):
        with torch.no_grad():
            tensor.copy_(values)
    return tensor


def _refill(container: Any, items: Any, inner: dict[Any, Callable[[], Any]]) -> Any:
    for key, put_back in inner.items():
        items[key] = put_back()
    container.clear()
    container.extend(items) if isinstance(container, list) else container.update(items)
    return container


# -- Values of tensors, stored outside the memory that is measured or has run out --


class StoredCopies:
    """Copies of tensors, in host memory for those of a device, in a file for those of the CPU."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        # The file is closed with this object, and the system deletes it then.
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        own = [_own_part(tensor) for tensor in self._tensors]
        torch.save([t for t in own if t.device.type == "cpu"], self._file)
        self._copies = [t.cpu() for t in own if t.device.type != "cpu"]

    def restore(self) -> None:
        self._file.seek(0)
        stored = iter(torch.load(self._file, weights_only=True))
        copies = iter(self._copies)
        with torch.no_grad():
            for tensor in map(_own_part, self._tensors):
                tensor.copy_(next(stored) if tensor.device.type == "cpu" else next(copies))


def _own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory, or any other tensor itself."""
    with torch.no_grad():
        values: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        return values.detach()


# -- State that a training step may change, restored to the bit --
# Its parts can be used separately: a trial of a batch size restores everything, a replay all but parameters and
# optimizers, a split step what a forward leaves behind. The parameters have no gradients while the step runs; all else
# is copied, from a device to host memory.

# Buffers up to this size [elements] are copied at each refresh; batch norm changes its own without a new version.
_SMALL = 65_536


class Part(Protocol):
    """State as it was when the object was made."""

    def restore(self) -> None: ...


def restored(*parts: Part) -> AbstractContextManager[Any]:
    """Restore several parts, in reverse order, when the body ends."""
    stack = ExitStack()
    for part in parts:
        stack.callback(part.restore)
    return stack


def whole_run(
    module: nn.Module,
    optimizers: Iterable[Optimizer] = (),
    *,
    scaler: object | None = None,  # of the precision plugin
    generators: Iterable[torch.Generator] = (),  # of loaders and samplers, in addition to the global ones
    tensors: bool = True,  # False: an engine keeps parameters and buffers itself
) -> list[Part]:
    """Return all that training steps change."""
    others = [*optimizers, *([] if scaler is None else [scaler])]
    parts = RandomState(generators), Attributes(others, leaves=module.parameters())
    values = [StoredCopies([*module.parameters(), *module.buffers()])] if tensors else []
    return [*parts, *values, ModuleAttributes(module), Gradients(module)]


class Gradients:
    """Gradients and ``requires_grad`` flags; the parameters have no gradients until these are restored."""

    # If one of several optimizers is toggled, the flags are set to what they were before that.

    def __init__(self, module: nn.Module) -> None:
        untoggled = getattr(module, "_param_requires_grad_state", {})
        self._kept = [(p, p.grad, p.requires_grad) for p in module.parameters()]
        for parameter, _, flag in self._kept:
            parameter.grad = None
            parameter.requires_grad_(untoggled.get(parameter, flag))

    def restore(self) -> None:
        for parameter, grad, flag in self._kept:
            parameter.grad = grad
            parameter.requires_grad_(flag)


class BufferCopies:
    """Copies of a module's buffers that are cheap to refresh in every step."""

    # Small buffers are copied each time in one fused call. Large ones (masks, tables) hardly ever change, and are
    # copied only if their version counter has changed.

    def __init__(
        self, module: nn.Module, *, trusts_versions: bool = True, but: tuple[type[nn.Module], ...] = ()
    ) -> None:
        # `trusts_versions=False`: copy large ones each time, because a change through ``.data`` does not count.
        # `but`: modules whose own buffers are left as a step makes them.
        self._smallest = _SMALL if trusts_versions else sys.maxsize
        # These include buffers that are None, which named_buffers() leaves out.
        parts = [part for part in module.modules() if not isinstance(part, but)]
        self._places = [(part, name) for part in parts for name in part._buffers]
        self._kept: dict[tuple[nn.Module, str], Tensor] = {}  # the buffers, by where they are
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Make the copies equal to the buffers as they are now."""
        there = {
            (part, name): buffer
            for part, name in self._places
            if (buffer := part._buffers.get(name)) is not None and not buffer.is_meta
        }
        now = list(there.values())
        if list(map(id, now)) != list(map(id, self._kept.values())):
            self._kept, self._copies = there, [b.detach().clone() for b in now]
        elif stale := [i for i, b in enumerate(now) if b.numel() <= self._smallest or b._version != self._versions[i]]:
            with torch.no_grad():
                torch._foreach_copy_([self._copies[i] for i in stale], [now[i] for i in stale])
        self._versions = [b._version for b in now]

    def restore(self) -> None:
        """Give the buffers the values that they had at the last refresh."""
        for ((module, name), buffer), values in zip(self._kept.items(), self._copies, strict=True):
            # Directly, because the module may override `__setattr__`.
            module._buffers[name] = _with_values(buffer, values)
