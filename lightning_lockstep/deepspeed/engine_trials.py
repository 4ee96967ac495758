"""Steps apart from the run: on the plain module or on the engine, whose state is put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_lockstep._lightning import LightningModule, Precision
from lightning_lockstep.deepspeed.config_parsing import is_given, section
from lightning_lockstep.deepspeed.engine import LossScaleHistory
from lightning_lockstep.deepspeed.engine_adapters import adapter_of
from lightning_lockstep.steps.isolated_step import gradients_apart
from lightning_lockstep.steps.patching import assigned, replaced
from lightning_lockstep.steps.snapshot import StoredCopies

# -- Forward and backward passes that DeepSpeed's engine does not notice, as a replay or a trial needs them --


@contextmanager
def without_engine(strategy: Any, module: LightningModule, engine: Any) -> Iterator[None]:
    """Let the strategy's forward and backward be those of torch, in the precision that the engine would use."""
    # In stages 0 to 2 of ZeRO gradients are kept apart. In stage 3 parameters are gathered module by module as in
    # training, by all ranks together; their gradients are computed and let go. Either way none reaches the engine.
    precision = PlainPrecision(strategy.precision_plugin, engine)
    is_divided = engine.zero_optimization_partition_weights()
    parameters = module.parameters()
    apart = _divided_parameters(module, engine) if is_divided else gradients_apart(parameters, hooks=False)
    with apart, assigned(strategy, precision_plugin=precision):
        yield


@contextmanager
def _divided_parameters(module: LightningModule, engine: Any) -> Iterator[None]:
    """Let a backward of the body compute gradients of divided parameters without accumulating them."""

    def backward(loss: Tensor, *args: Any, gradient: Tensor | None = None, **kwargs: Any) -> None:
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        with ExitStack() as stack:
            # After all other hooks of a parameter, zeros that take no memory replace its gradient, so that the whole
            # gradients are never in memory together.
            for parameter in parameters:
                hook = parameter.register_hook(lambda gradient: gradient.new_zeros(()).expand_as(gradient))  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
            # Unlike backward() it runs none of the hooks by which gradients are reduced.
            torch.autograd.grad(loss, parameters, gradient, allow_unused=True)

    with replaced(module, backward=backward):
        yield
    engine.empty_partition_cache()  # parameters stay whole if no backward runs through their module


class PlainPrecision(Precision):
    """Autocast and loss scaling as the engine's configuration asks for them, without the engine."""

    def __init__(self, plugin: Precision, engine: Any) -> None:
        super().__init__()
        self.precision = plugin.precision
        self._plugin, self._engine = plugin, engine
        outcome = adapter_of(engine).outcome()
        self._scale = 1.0 if outcome is None or outcome.scale is None else outcome.scale

    def convert_input(self, data: Any) -> Any:
        return self._plugin.convert_input(data)

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override] # any context will do
        """Return the autocast that the engine enters around a forward, if any."""
        engine = self._engine
        if not engine.torch_autocast_enabled():
            return nullcontext()
        return torch.autocast(engine.device.type, dtype=engine.torch_autocast_dtype())

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self._scale != 1:
            kwargs.setdefault("gradient", torch.full_like(tensor, self._scale))
        super().backward(tensor, model, optimizer, *args, **kwargs)


# -- All that a step of DeepSpeed's engine changes, put back wherever the step has ended --
# The engine keeps its state in many objects: flags and counters, buckets half full of gradients, parameters that are
# gathered or not, a trace of the order of modules. None of it is meant to be put back. So every object of DeepSpeed
# that can be reached from the engine is remembered with its attributes, every list and dictionary with what is in it,
# and every tensor with the memory that it stood for.

# What these attributes lead to is not the state of a step: that of the module is kept elsewhere, and a bucket (up to
# some GB, of which a small model touches a part) is written before it is read.
_LEFT_OUT = {"buffer", "module", "_modules"}


class EngineState:
    """State of an engine, of its optimizer and of the parameters that they hold."""

    # The structure is cheap to put back, and put back after every step that may have failed; the values are stored
    # outside the memory that is measured, and put back once.

    def __init__(self, engine: Any, module: nn.Module, others: Iterable[list[Any]] = ()) -> None:
        self._put_back: list[Callable[[], None]] = []
        self._memory: dict[int, Tensor] = {}
        self._seen: dict[int, Any] = {}  # holds on to them, so that no id is taken twice
        # `others` are lists that steps also change, and to which the engine does not lead.
        waiting = [engine, *others, *module.parameters(), *module.buffers()]
        while waiting:
            waiting += self._keep(waiting.pop())
        self._values = StoredCopies(self._memory.values())

    def restore_structure(self) -> None:
        for put_back in self._put_back:
            put_back()

    def restore(self) -> None:
        self.restore_structure()
        self._values.restore()

    def _keep(self, value: Any) -> Iterator[Any]:
        """Remember one object, and yield what it leads to."""
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            yield from self._keep_tensor(value)
        elif isinstance(value, dict):
            contents = dict(value)
            self._put_back.append(partial(_refill, value, contents))
            yield from (*contents, *(each for name, each in contents.items() if name not in _LEFT_OUT))
        elif isinstance(value, (list, deque, set)):
            self._put_back.append(partial(_refill, value, list(value)))
            yield from value
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        if isinstance(value, Tensor) or _is_engines(value):
            yield vars(value)

    def _keep_tensor(self, tensor: Tensor) -> Iterator[Any]:
        data, grad, flag = tensor.detach(), tensor.grad if tensor.is_leaf else None, tensor.requires_grad
        self._put_back.append(partial(_reattach, tensor, data, grad, flag))
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device.type != "meta":
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._memory.setdefault(storage.data_ptr(), flat)
        if grad is not None:
            yield grad


def _is_engines(value: object) -> bool:
    kind = type(value)
    of_deepspeed = kind.__module__.split(".")[0] == "deepspeed"
    return (of_deepspeed or isinstance(value, (Optimizer, LRScheduler))) and hasattr(value, "__dict__")


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)


def _reattach(tensor: Tensor, data: Tensor, grad: Tensor | None, flag: bool) -> None:
    tensor.data = data
    if tensor.is_leaf:
        tensor.grad = grad
        tensor.requires_grad_(flag)


# -- Steps that DeepSpeed's engine makes on one rank alone, to see whether a batch fits into memory --
# The engine itself makes the step, with its buckets, its gathered parameters and its optimizer, so that it needs what
# the step of the run needs. What it sends is answered on the spot (`distributed/local_collectives.py`), with tensors of
# the size of the real answer. The parameters that it gathers are then not the model's, but take the same memory;
# `EngineState` above puts everything back.

_NOT_TRIED = ("flops_profiler", "autotuning", "hybrid_engine", "data_efficiency")


class EngineTrials:
    """What a search for a batch size needs of a strategy with an engine."""

    def __init__(self, strategy: Any, given: Mapping[str, Any]) -> None:
        self._strategy, self._engine, self._given = strategy, strategy.model, given

    def why_fixed(self, *, accumulates: bool) -> str:
        """Return why the batch size of a run, or its accumulation if that counts, cannot be changed, or nothing."""
        names = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps")
        for key in names if accumulates else names[:2]:
            if is_given(value := self._given.get(key)):
                fixed = f"{key}={value!r} in the config of DeepSpeed fixes it."
                return f"{fixed} Write {key}: 'auto' there, or leave it out"
        return ""

    def why_not_possible(self) -> str:
        """Return why the engine cannot make a step on one rank alone, or nothing."""
        used = [name for name in _NOT_TRIED if section(self._given, name).get("enabled") is True]
        used += ["zenflow"] if is_given(section(self._given, "zero_optimization").get("zenflow")) else []
        for name in ("offload_optimizer", "offload_param"):
            is_on_disk = section(self._given, "zero_optimization", name).get("device") == "nvme"
            used += [f"{name} to NVMe"] if is_on_disk else []
        if used:
            return f"{used[0]} of the config of DeepSpeed: its state cannot be put back after a trial"
        if getattr(self._strategy.precision_plugin, "has_accumulated", False):
            return "batches have been accumulated already, and the optimizer has not stepped"
        return ""

    def state(self) -> EngineState:
        """Return all that steps of the engine change, to put back."""
        # A forward that failed leaves its modules here.
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        return EngineState(self._engine, self._strategy.lightning_module, [FWD_MODULE_STACK])

    @contextmanager
    def alone(self, *, accumulates: bool) -> Iterator[int]:
        """Return a context in which the engine steps on this rank alone: its collectives are answered here."""
        # Yields the batches of an optimizer step: two if the run accumulates, because more need no more memory.
        from deepspeed import checkpointing
        from deepspeed.runtime.zero import utils

        engine, plugin = self._engine, self._strategy.precision_plugin
        passes = 2 if accumulates or engine.gradient_accumulation_steps() > 1 else 1
        # The engine's state is put back later.
        adapter_of(engine).set_for_trial(passes)
        # DeepSpeed compares the order of the modules with rank 0's, which does not take part.
        alone = SimpleNamespace(get_rank=lambda: 0, broadcast=lambda *a, **k: None)
        with replaced(utils, dist=alone), replaced(plugin, history=LossScaleHistory(), has_accumulated=False):
            try:
                yield passes
            finally:
                checkpointing.reset()  # activations that only a backward removes, which may not have run

    def take_sizes(self, *, batch_size: int, accumulate: int) -> None:
        """Let the engine go on with other sizes, by which it counts samples and knows its optimizer steps."""
        if not hasattr(self._engine, "train_batch_size"):
            return  # there is no engine yet: it is made with these sizes
        adapter_of(self._engine).set_sizes(batch_size=batch_size, accumulate=accumulate)
        self._strategy.config |= {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": accumulate,
            "train_batch_size": self._engine.train_batch_size(),
        }
