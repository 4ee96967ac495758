"""What counts: a padding sample leaves nothing behind, and values of an epoch are those of all ranks.

A rank without a sample of its own in a batch (the last batch may have fewer samples than there are ranks) runs the step
on a padding sample, because the other ranks may wait for it. What the step adds to metrics, logged values and buffers
is taken away again, so that not even nan stays; in an evaluation also what the module keeps itself.

Lightning's logger connector says when a batch begins and ends and when the values of an epoch are read, in training as
in evaluation. Here its methods that do so are extended, and the loops' methods that run, log and predict.

At the end of an epoch what the ranks have logged is combined, each value with the weight that Lightning has given it.
Each combination is a gather over the side channel, so that a rank at the end of its batches waits in no collective
while others are in those of their steps. Every rank takes part, whatever it has logged. A metric object that only other
ranks have logged is logged on this one too, because its sync waits for all. A value logged at a step with
``sync_dist=True`` is the mean over the samples of all ranks.

If the lists of a metric have different lengths on the ranks, whole lists are gathered: torchmetrics would gather one
element after the other, and a rank with fewer elements would leave the others waiting.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from lightning_lockstep._lightning import move_data_to_device
from lightning_lockstep.distributed import Gather, SideChannel, current_communicator
from lightning_lockstep.distributed.failure.attempt import attempt_on
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.loaders.global_order import GlobalBatches, parts_of
from lightning_lockstep.loaders.weights import samples_of_batch
from lightning_lockstep.steps.patching import call_around, put_in_place
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, restorer


class Counting:
    """What counts in the runs of a Trainer. Ranks: all make one; they gather at the end of each epoch."""

    def __init__(self, trainer: Any, timeout: float) -> None:
        # `timeout`: longest wait for another rank at the end of an epoch [s].
        self.trainer, self._timeout = trainer, timeout
        self.sizes: tuple[int, int] | None = None  # samples of the current batch: this rank's, and all ranks'
        self._kept: list[Any] = []  # of a padding batch
        self._numbers = Counter[int]()  # batches of each loader in this evaluation
        self._begins = True  # whether the next training batch is the first one of its epoch here
        self._topic, self._gathers = "", 0  # of this epoch's gathers: their name, and how many there were
        self._combined = set[str]()  # keys of values that they have combined
        self._reduction: Callable[..., Any] | None = None
        self._warned = False  # of a gather of uneven parts

    def attach(self) -> None:
        trainer, connector = self.trainer, self.trainer._logger_connector
        for name in ("on_batch_start", "on_batch_end", "epoch_end_reached", "on_epoch_end"):
            call_around(connector, **{name: getattr(self, name)})
        epochs = trainer.fit_loop.epoch_loop
        for loop in (epochs.val_loop, trainer.validate_loop, trainer.test_loop):
            put_in_place(loop, "run", partial(self._evaluate, loop))
            call_around(loop._results, log=self._log)
        call_around(epochs._results, log=self._log)
        call_around(trainer.predict_loop, _predict_step=self._predict)

    # -- a batch --

    @property
    def is_padding(self) -> bool:
        """Whether this rank has no sample in the current batch."""
        return self.sizes is not None and self.sizes[0] == 0

    def on_batch_start(self, begin: Callable[..., None], batch: Any, dataloader_idx: int | None = None) -> None:
        begin(batch, dataloader_idx)
        trainer, index = self.trainer, dataloader_idx or 0
        if trainer.training:
            number = trainer.fit_loop.epoch_loop.batch_idx
            if self._begins:
                self._begins = False
                self.gather_lists_whole()
                check_combined(trainer.fit_loop._combined_loader.flattened, trainer.world_size)
        else:
            number = self._numbers[index]
            self._numbers[index] += 1
        self.sizes = samples_of_batch(trainer._active_loop, number, index)
        self._keep_state()

    def _keep_state(self) -> None:
        """Keep what the batch may change, if it is padding."""
        # In training `StepCopies` restores the module right after its step: what callbacks change after that is kept.
        trainer, self._kept = self.trainer, []
        is_padding = trainer.strategy.is_padding_batch() if trainer.training else self.is_padding
        if is_padding:
            results = trainer._results or {}
            self._kept = [*map(ModuleAttributes, [*self.metrics(), *results.values()])]
            if not trainer.training:
                module = trainer.lightning_module
                self._kept += [ModuleAttributes(module), BufferCopies(module)]

    def on_batch_end(self, end: Callable[[], None]) -> None:
        self.trainer.strategy.put_back()
        self._put_back()
        end()

    def _put_back(self) -> None:
        """Restore metrics and logged values; what this batch was the first to log stays, but empty."""
        if not self._kept:
            return
        results = self.trainer._results or {}
        logged = {key: not one.has_reset for key, one in results.items()}
        of_all = {key: one._forward_cache for key, one in results.items() if one.meta.sync.should}
        dtypes = {key: one.value.dtype for key, one in results.items() if one.is_tensor}
        for one in results.values():
            if one.is_tensor:
                one.reset()  # below, what was there before gets its values back
        for attributes in self._kept:
            attributes.restore()
        for key, one in results.items():
            one.has_reset = not logged[key]
            one._computed = None  # which may be that of the epoch before
            if key in dtypes:  # Lightning reduces what is empty here too
                one.value = one.value.to(dtypes[key])
            one._forward_cache = of_all.get(key, one._forward_cache)
        self._kept = []

    def _predict(self, step: Callable[..., None], *args: Any) -> None:
        """Make a prediction, which is not kept if it is one of padding."""
        loop, number, dataloader = self.trainer.predict_loop, args[1], args[2]
        self.sizes = samples_of_batch(loop, number, dataloader)
        if not self.is_padding:
            step(*args)
            return
        lists = loop._predictions[dataloader], loop.epoch_batch_indices[dataloader]
        lengths = [len(one) for one in lists]
        seen = getattr(loop._combined_loader.flattened[dataloader].batch_sampler, "seen_batch_indices", None)
        if seen:
            seen[number] = []  # a BasePredictionWriter gets them
        self._keep_state()
        step(*args)
        self._put_back()
        for one, length in zip(lists, lengths, strict=True):
            del one[length:]

    def check_gather(self, ranks: int) -> None:
        """Raise, on all ranks, if a padding sample would take part in a gather of the program; warn of uneven parts."""
        if self.sizes is None or ranks == 1:
            return
        advice = "Use lightning_lockstep.gather_uneven() for parts of any size, without padding, or drop_last=True."
        if self.sizes[1] < ranks:
            raise ConfigurationError(
                f"self.all_gather in a batch of {self.sizes[1]} samples on {ranks} ranks: expected a sample on each"
                f" rank, because a padding sample would take part. {advice}"
            )
        parts = None
        with suppress(AttributeError, IndexError):
            parts = parts_of(self.trainer._active_loop._combined_loader.flattened[0]).uneven
        if parts is not None and not self._warned and current_communicator().is_main:
            self._warned = True
            warnings.warn(
                f"self.all_gather expects the same sizes on all ranks, but a batch of this epoch has {parts[0]} samples"
                f" on some ranks and {parts[1]} on others. {advice}",
                stacklevel=2,
            )

    # -- values logged at a step --

    def _log(self, log: Callable[..., None], *args: Any, **options: Any) -> None:
        reduce = options.get("sync_dist_fn")
        if options.get("sync_dist") and reduce is not None:
            # Lightning compares how a value is logged each time, and copies whatever is no function.
            self._reduction = self._reduction or (lambda *given, **how: self._reduce(reduce, *given, **how))
            options["sync_dist_fn"] = self._reduction
        log(*args, **options)

    def _reduce(self, reduce: Callable[..., Any], value: Any, group: Any = None, reduce_op: Any = None) -> Any:
        """Reduce a value logged at a step, each rank weighted by its samples; sums of an epoch are not weighted."""
        results = self.trainer._results
        if self.sizes is not None and results is not None and results.batch is not None:
            own, total = self.sizes
            if reduce_op in ("mean", "avg", None):
                value = value * (own * current_communicator().world_size / total) if own else value.zero_()
            elif not own:
                value = value.fill_({"sum": 0.0, "max": -torch.inf, "min": torch.inf}[reduce_op])
        return reduce(value, group=group, reduce_op=reduce_op)

    # -- values of an epoch --

    def _evaluate(self, loop: Any) -> Any:
        self._begin("evaluation")
        self._numbers.clear()
        self.gather_lists_whole()
        outputs = type(loop).run(loop)  # a bound method would keep a Trainer from being pickled
        if loop.max_batches and not self._gathers:  # this rank had no batch, and others may have some
            self._combine_all(loop, ended=True)
            loop._results.reset(metrics=False)
        self._begin("")
        return outputs

    def _begin(self, what: str) -> None:
        attempt = attempt_on(current_communicator().side_channel)
        self._topic, self._gathers, self._combined = what and attempt.topic(what), 0, set()

    def epoch_end_reached(self, reached: Callable[[], None]) -> None:
        self.sizes = None
        if self.trainer.training:
            self._begins = True
            self._begin("epoch")
            self._combine_all(self.trainer.fit_loop.epoch_loop, ended=False)
        elif self.trainer._results is not None:
            self._combine_all(self.trainer._active_loop, ended=False)
        reached()

    def on_epoch_end(self, end: Callable[[], None]) -> None:
        loop = self.trainer.fit_loop.epoch_loop if self.trainer.training else self.trainer._active_loop
        self._combine_all(loop, ended=True)
        end()

    def _combine_all(self, loop: Any, *, ended: bool) -> None:
        """Combine what was logged for a loader, or outside loaders at the end. Ranks: all, together."""
        # Every rank gathers once for each loader and once at the end, even if a loader has given it no batch.
        results, combined = loop._results, getattr(loop, "_combined_loader", None)
        loaders = len(combined.flattened) if combined is not None and combined._mode == "sequential" else 1
        until = loaders + 1 if ended else (results.dataloader_idx or 0) + 1
        while self._gathers < until:
            self._combine(results, self._gathers if self._gathers < loaders > 1 else None)
            self._gathers += 1

    def _combine(self, results: Any, index: int | None) -> None:
        """Combine the values logged for a loader on all ranks, so that Lightning reduces none."""
        own = {key: one for key, one in results.items() if key not in self._combined and _is_of(one, index)}
        gather = current_communicator().side_channel.get_or_create(_gather)
        gather.timeout = self._timeout
        sent = {key: _Logged.of(one) for key, one in own.items()}
        found = gather.collect(f"{self._topic}.{self._gathers}", sent)
        logged = defaultdict[str, list[_Logged]](list)
        for of_rank in found.complete("What a rank has logged in an epoch"):
            for key, value in of_rank.items():
                logged[key].append(_Logged(*value))
        device, module = self.trainer.strategy.root_device, self.trainer.lightning_module
        before, results.dataloader_idx = results.dataloader_idx, index
        for key, values in logged.items():
            metric = values[0].how["metric_attribute"]
            if key not in own:  # only another rank has logged it, but a callback may ask for it on every rank
                value = torch.zeros((), device=device) if metric is None else module.get_submodule(metric)
                results.log(value=value, sync_dist_fn=self.trainer.strategy.reduce, **values[0].how)
            if metric is None:
                results[key]._computed = _Logged.combined(values).to(device)
            else:  # its sync is a collective, which comes in the same order on all ranks
                results[key] = results.pop(key)
        results.dataloader_idx = before
        self._combined.update(logged)

    # -- metric objects --

    def metrics(self) -> list[Metric | MetricCollection]:
        """Return the metrics of the module and of callbacks, those in plain lists and dictionaries included."""
        holders = [*self.trainer.lightning_module.modules(), *self.trainer.callbacks]
        held = chain.from_iterable(pytree.tree_flatten(vars(holder))[0] for holder in holders)
        kinds = Metric, MetricCollection
        inner = chain.from_iterable(one.modules() for one in held if isinstance(one, kinds))
        return list({id(one): one for one in inner if isinstance(one, kinds)}.values())

    def gather_lists_whole(self) -> None:
        """Have each metric gather its lists as wholes if their lengths differ between ranks."""
        own = (one for one in self.metrics() if isinstance(one, Metric) and one.process_group is None)
        for metric in own:
            if "_sync_dist" not in vars(metric):
                put_in_place(metric, "_sync_dist", partial(_with_whole_lists, metric, metric._sync_dist))


class StepCopies:
    """The values that a training step may change in a module: buffers, and other tensors and sums that it has."""

    # Lists and counters stay: a program expects as many entries on each rank as there were steps.

    def __init__(self, module: Any, *, but: tuple[type[torch.nn.Module], ...] = ()) -> None:
        # `but`: modules whose own buffers are left as the step makes them.
        self._buffers = BufferCopies(module, but=but)
        self._others = [
            (vars(part), name, restorer(value))
            for part in module.modules()
            for name, value in vars(part).items()
            if isinstance(value, (Tensor, float))
        ]

    def restore(self) -> None:
        for attributes, name, put_back in self._others:
            attributes[name] = put_back()
        self._buffers.restore()


def check_combined(loaders: list[Any], ranks: int) -> None:
    """Raise, on all ranks, if a batch of several loaders would have padding of one of them on some rank."""
    if len(loaders) == 1:
        return
    for number, parts in enumerate(map(parts_of, loaders)):
        least = parts.smallest() if isinstance(parts, GlobalBatches) else None
        if least is not None and least < ranks:
            raise ConfigurationError(
                f"Training loader {number} of {len(loaders)} that are taken together has a batch of {least} samples or"
                f" batches for {ranks} ranks: expected one for each, because padding cannot be told from the samples of"
                " the other loaders. Use drop_last=True, or a batch size that divides its samples."
            )


def _gather(channel: SideChannel) -> Gather:
    return Gather(channel, "what ranks have logged in", watched=True)


def _is_of(one: Any, index: int | None) -> bool:
    """Return whether a result is a value or metric of that loader for the epoch, and one of all ranks."""
    meta = one.meta
    group = meta.sync.group if one.is_tensor else one.value.process_group
    left_out = one.has_reset or group is not None or meta.sync.rank_zero_only or not meta.on_epoch
    return bool(meta.dataloader_idx == index and not left_out)


class _Logged(NamedTuple):
    """A value that a rank has logged for an epoch, or the fact that it has logged a metric object."""

    value: float  # for a mean, the weighted sum
    weight: float
    dtype: str  # without 'torch.'
    how: dict[str, Any]  # arguments with which it is logged

    @classmethod
    def of(cls, one: Any) -> _Logged:
        meta = one.meta
        names = "name prog_bar logger on_step on_epoch enable_graph add_dataloader_idx metric_attribute"
        how = {name: getattr(meta, name) for name in names.split()}
        how |= {"fx": meta.fx.removesuffix(f".{meta.dataloader_idx}"), "reduce_fx": meta.reduce_fx.__name__}
        how["sync_dist"] = meta.sync.should
        if not one.is_tensor:
            return cls(0.0, 0.0, "", how)
        weight = float(one.cumulated_batch_size) if meta.is_mean_reduction else 1.0
        return cls(float(one.value), weight, str(one.value.dtype).removeprefix("torch."), how)

    @staticmethod
    def combined(values: list[_Logged]) -> Tensor:
        """Return the value of all ranks, which is the same on each, bit for bit."""
        numbers = torch.tensor([(one.value, one.weight) for one in values], dtype=torch.float64)
        operation, hook = values[0].how["reduce_fx"], values[0].how["fx"]
        value: Tensor
        of_all = hook.endswith("_epoch_end") and not values[0].how["sync_dist"]
        if operation == "mean" or (operation == "sum" and of_all):
            # What a program logs at the end of an epoch is no longer about one rank's samples.
            total, weight = numbers.sum(0)
            value = total / weight
        else:
            value = getattr(torch, operation)(numbers[:, 0])
        dtypes: list[torch.dtype] = [getattr(torch, one.dtype) for one in values]
        return value.to(max(dtypes, key=lambda dtype: dtype.itemsize))


_NOTHING = object()  # stands for an element that a shorter list does not have


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
