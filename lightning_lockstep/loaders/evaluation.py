"""Evaluation that counts each sample once, and gives every rank the values that one process would log.

Three things are done in each run of Lightning's loops for validation, test and prediction:

- A rank without a sample of its own in a batch (the last batch may have fewer samples than there are ranks) runs the
  step on a padding sample, because the other ranks may wait for it. What the step adds to metrics and to logged values
  is taken away again, so that nothing of it counts, not even nan.
- Before Lightning reads what was logged for an epoch, one gather combines the values of all ranks, each with the weight
  that Lightning has given it. Every rank takes part, whatever it has logged. The gather goes over the side channel, so
  that a rank at the end of its batches waits in no collective while other ranks are in those of their steps.
- If the lists of a metric have different lengths on the ranks, whole lists are gathered. torchmetrics would gather one
  element after the other, and a rank with fewer elements would leave the others waiting.

Lightning itself reduces values logged with ``sync_dist=True`` or ``rank_zero_only=True``. At a step, ``sync_dist=True``
gives the mean of all ranks, in which a padding sample counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_lockstep._lightning import move_data_to_device
from lightning_lockstep.distributed import Gather, SideChannel, current_communicator
from lightning_lockstep.distributed.failure.propagation import propagation_on
from lightning_lockstep.loaders.global_order import parts_of
from lightning_lockstep.steps.patching import put_in_place, replaced
from lightning_lockstep.steps.snapshot import ModuleAttributes


def count_each_sample_once(trainer: Any, timeout: float) -> None:
    """Make the loops of a Trainer do this from now on. Ranks: all; they gather at the end of each evaluation."""
    # `timeout`: longest wait there for another rank [s].
    validations = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop
    for loop in (*validations, trainer.test_loop, trainer.predict_loop):
        put_in_place(loop, "run", _Evaluation(trainer, loop, timeout).run)


class _Evaluation:
    """The runs of one loop."""

    def __init__(self, trainer: Any, loop: Any, timeout: float) -> None:
        self._trainer, self._loop, self._timeout = trainer, loop, timeout
        self._number, self._gathers, self._combined = "", 0, set[str]()  # of the run under way

    def run(self) -> Any:
        propagation = propagation_on(current_communicator().side_channel)
        self._number, self._gathers, self._combined = propagation.topic("evaluation"), 0, set()
        loop = self._loop
        with ExitStack() as stack:
            for owner, hooks in self._hooks():
                stack.enter_context(replaced(owner, **hooks))
            for metric in self._metrics():
                if isinstance(metric, Metric) and metric.process_group is None:
                    sync = partial(_with_whole_lists, metric, metric._sync_dist)
                    stack.enter_context(replaced(metric, _sync_dist=sync))
            outputs = type(loop).run(loop)
        if loop._results is not None and loop.max_batches and not self._gathers:  # this rank had no batch
            self._before_reading(ended=True)
            loop._results.reset(metrics=False)
        return outputs

    def _hooks(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield replacements for methods of Lightning: for a step, and for what reads the logged values."""
        loop, connector = self._loop, self._trainer._logger_connector
        name = "_predict_step" if hasattr(loop, "_predict_step") else "_evaluation_step"
        make_step = getattr(loop, name)
        yield loop, {name: lambda *args: self._step(partial(make_step, *args), args[1], args[2])}
        if name == "_evaluation_step":
            end_loader, end_all = loop._store_dataloader_outputs, connector.on_epoch_end

            def read_loader() -> None:
                self._before_reading(ended=False)
                end_loader()

            def read_all() -> None:
                self._before_reading(ended=True)
                end_all()

            yield loop, {"_store_dataloader_outputs": read_loader}
            yield connector, {"on_epoch_end": read_all}

    def _metrics(self) -> list[Metric | MetricCollection]:
        """Return the metrics of the module and of callbacks, those in plain lists and dictionaries included."""
        holders = [*self._trainer.lightning_module.modules(), *self._trainer.callbacks]
        held = chain.from_iterable(pytree.tree_flatten(vars(holder))[0] for holder in holders)
        kinds = Metric, MetricCollection
        inner = chain.from_iterable(one.modules() for one in held if isinstance(one, kinds))
        return list({id(one): one for one in inner if isinstance(one, kinds)}.values())

    def _step(self, make: Callable[[], None], batch_idx: int, dataloader_idx: int) -> None:
        """Make the step of a batch, of which nothing counts if this rank has no sample in it."""
        loaders = self._loop._combined_loader.flattened
        # A batch of several loaders counts if this rank has a sample of any of them in it.
        used = loaders if _joins_batches(self._loop) else [loaders[dataloader_idx]]
        parts = [parts_of(one) for one in used]
        if any(one is None or one.sizes(batch_idx % len(one))[0] for one in parts):
            make()
            return
        lists = []
        if hasattr(self._loop, "_predictions"):
            lists = [self._loop._predictions[dataloader_idx], self._loop.epoch_batch_indices[dataloader_idx]]
        lengths = [len(one) for one in lists]
        seen = getattr(getattr(loaders[dataloader_idx], "batch_sampler", None), "seen_batch_indices", None)
        if seen:
            seen[batch_idx] = []  # a BasePredictionWriter gets them
        with self._not_counting():
            make()
        for one, length in zip(lists, lengths, strict=True):
            del one[length:]

    @contextmanager
    def _not_counting(self) -> Iterator[None]:
        """Restore metrics and logged values when the body ends; what it was the first to log stays, but empty."""
        logs = self._loop._results
        results = {} if logs is None else logs
        kept = [ModuleAttributes(one) for one in (*self._metrics(), *results.values())]
        yield
        logged = {key: not one.has_reset for key, one in results.items()}
        for one in results.values():
            if one.is_tensor:
                one.reset()  # what was there before gets its values back
        for attributes in kept:
            attributes.restore()
        for key, one in results.items():
            one.has_reset = not logged[key]
            one._computed = None  # which may be that of the epoch before

    def _before_reading(self, ended: bool) -> None:
        """Combine what was logged for a loader, or outside of loaders at the end. Ranks: all, together."""
        # Every rank gathers once for each loader and once at the end, even if a loader has given it no batch.
        results = self._loop._results
        number = 1 if _joins_batches(self._loop) else len(self._loop._combined_loader.flattened)
        until = number + 1 if ended else (results.dataloader_idx or 0) + 1
        while self._gathers < until:
            self._combine(results, self._gathers if self._gathers < number > 1 else None)
            self._gathers += 1

    def _combine(self, results: Any, index: int | None) -> None:
        """Combine the values logged for a loader that Lightning does not reduce, on all ranks."""
        own = {key: one for key, one in results.items() if key not in self._combined and _is_of(one, index)}
        gather = current_communicator().side_channel.get_or_create(_gather)
        gather.timeout = self._timeout
        found = gather.collect(
            f"{self._number}.{self._gathers}", {key: _Logged.of(one) for key, one in own.items()}
        )
        logged = defaultdict[str, list[_Logged]](list)
        for of_rank in found.complete("What a rank has logged in an evaluation"):
            for key, value in of_rank.items():
                logged[key].append(_Logged(*value))
        device = self._trainer.strategy.root_device
        before, results.dataloader_idx = results.dataloader_idx, index
        for key, values in logged.items():
            if key not in own:  # only another rank has logged it, but a callback may ask for it on every rank
                reduce = self._trainer.strategy.reduce
                results.log(value=torch.zeros((), device=device), sync_dist_fn=reduce, **values[0].how)
            results[key]._computed = _Logged.combined(values).to(device)
        results.dataloader_idx = before
        self._combined.update(logged)


def _gather(channel: SideChannel) -> Gather:
    return Gather(channel, "evaluation")


def _is_of(one: Any, index: int | None) -> bool:
    """Return whether a result is a value of that loader for the epoch that Lightning would not reduce."""
    meta = one.meta
    left_out = one.has_reset or meta.sync.should or meta.sync.rank_zero_only or not meta.on_epoch
    return bool(one.is_tensor and meta.dataloader_idx == index and not left_out)


class _Logged(NamedTuple):
    """A value that a rank has logged for an epoch."""

    value: float  # for a mean, the weighted sum
    weight: float
    dtype: str  # without 'torch.'
    how: dict[str, Any]  # arguments with which it is logged

    @classmethod
    def of(cls, one: Any) -> _Logged:
        meta = one.meta
        names = ("name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
        how = {name: getattr(meta, name) for name in names}
        how |= {"fx": meta.fx.removesuffix(f".{meta.dataloader_idx}"), "reduce_fx": meta.reduce_fx.__name__}
        weight = float(one.cumulated_batch_size) if meta.is_mean_reduction else 1.0
        return cls(float(one.value), weight, str(one.value.dtype).removeprefix("torch."), how)

    @staticmethod
    def combined(values: list[_Logged]) -> torch.Tensor:
        """Return the value of all ranks, which is the same on each, bit for bit."""
        numbers = torch.tensor([(one.value, one.weight) for one in values], dtype=torch.float64)
        operation = values[0].how["reduce_fx"]
        value: torch.Tensor
        if operation == "mean":
            total, weight = numbers.sum(0)
            value = total / weight
        else:
            value = getattr(torch, operation)(numbers[:, 0])
        dtypes: list[torch.dtype] = [getattr(torch, one.dtype) for one in values]
        return value.to(max(dtypes, key=lambda dtype: dtype.itemsize))


def _with_whole_lists(metric: Metric, sync: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Gather a metric's states, as whole lists if their lengths differ between ranks. Ranks: all, together."""
    own = {name: state for name, state in metric.metric_state.items() if isinstance(state, list)}
    communicator = current_communicator()
    lengths = communicator.gather([len(state) for state in own.values()]) if own else []
    if all(one == lengths[0] for one in lengths):
        sync(*args, **kwargs)
        return
    of_ranks = communicator.gather(move_data_to_device(own, torch.device("cpu")))
    for name in own:
        setattr(metric, name, [])
    sync(*args, **kwargs)
    for name in own:  # one element of each rank in turn, as in torchmetrics: the order of the data set
        in_turn = chain.from_iterable(zip_longest(*(one[name] for one in of_ranks), fillvalue=_NOTHING))
        whole = [element for element in in_turn if element is not _NOTHING]
        setattr(metric, name, move_data_to_device(whole, metric.device))


_NOTHING = object()


def _joins_batches(loop: Any) -> bool:
    """Return whether each batch of a loop is made of batches of several loaders."""
    combined = loop._combined_loader
    return len(combined.flattened) > 1 and combined._mode != "sequential"
