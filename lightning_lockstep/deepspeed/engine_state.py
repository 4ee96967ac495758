"""All that a step of DeepSpeed's engine changes, put back although the step may have ended anywhere.

The engine keeps its state in many objects: flags and counters, buckets half full of gradients, parameters that are
gathered or not, a trace of the order of modules. None of it is meant to be put back. So every object of DeepSpeed
that can be reached from the engine is remembered with its attributes, every list and dictionary with what is in it,
and every tensor with the memory that it stood for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_lockstep._doors.deepspeed_internals import WITHOUT_STATE
from lightning_lockstep._doors.torch_internals import MODULES
from lightning_lockstep.steps.stored_copies import StoredCopies

__all__ = ["EngineState"]

_CONTAINERS = (list, deque, set, dict)
# What these attributes lead to is no state of a step: the module's own is kept elsewhere; a bucket's memory, of up to
# some GB of which a small model touches a part, is written before it is read.
_LEFT_OUT = WITHOUT_STATE | {"module", MODULES}


class EngineState:
    """State of an engine, of its optimizer and of the parameters that they hold.

    The structure is cheap to put back, and done after every step that may have failed; the values are stored outside
    of the memory that is measured, and are put back once.
    """

    def __init__(self, engine: Any, module: nn.Module, others: Iterable[list[Any]] = ()) -> None:
        self._put_back: list[Callable[[], None]] = []
        self._memory: dict[int, Tensor] = {}
        self._seen: dict[int, Any] = {}  # holds on to them, so that no id is taken twice
        # The others are lists that steps change and the engine does not lead to.
        waiting = [engine, *others, *module.parameters(), *module.buffers()]
        while waiting:
            waiting += self._keep(waiting.pop())
        self._values = StoredCopies(list(self._memory.values()))

    def restore_structure(self) -> None:
        """Put back everything but the values of tensors."""
        for put_back in self._put_back:
            put_back()

    def restore(self) -> None:
        self.restore_structure()
        self._values.write_to(list(self._memory.values()))

    def __enter__(self) -> EngineState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def _keep(self, value: Any) -> Iterator[Any]:
        """Remember one object, and return what it leads to."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            yield from self._keep_tensor(value)
            return
        if isinstance(value, _CONTAINERS):
            contents = dict(value) if isinstance(value, dict) else list(value)
            self._put_back.append(partial(_refill, value, contents))
            yield from (*contents.keys(), *contents.values()) if isinstance(contents, dict) else contents
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        if _is_engines(value):
            yield from self._keep_attributes(value)

    def _keep_attributes(self, value: Any) -> Iterator[Any]:
        attributes = dict(vars(value))
        self._put_back.append(partial(_refill, vars(value), attributes))
        yield from (each for name, each in attributes.items() if name not in _LEFT_OUT)

    def _keep_tensor(self, tensor: Tensor) -> Iterator[Any]:
        attributes = dict(vars(tensor))
        data, grad, flag = tensor.detach(), tensor.grad if tensor.is_leaf else None, tensor.requires_grad
        self._put_back.append(partial(_reattach, tensor, data, grad, flag, attributes))
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device.type != "meta":
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._memory.setdefault(storage.data_ptr(), flat)
        yield from attributes.values()
        if grad is not None:
            yield grad


def _is_engines(value: object) -> bool:
    kind = type(value)
    of_deepspeed = kind.__module__.split(".")[0] == "deepspeed"
    return (of_deepspeed or isinstance(value, (Optimizer, LRScheduler))) and hasattr(value, "__dict__")


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)


def _reattach(
    tensor: Tensor, data: Tensor, grad: Tensor | None, flag: bool, attributes: dict[str, Any]
) -> None:
    if not _is_same_memory(tensor, data):
        tensor.data = data
    if tensor.is_leaf:
        tensor.grad = grad
        tensor.requires_grad_(flag)
    _refill(vars(tensor), attributes)


def _is_same_memory(tensor: Tensor, data: Tensor) -> bool:
    return (
        tensor.data_ptr() == data.data_ptr()
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.dtype == data.dtype
    )
