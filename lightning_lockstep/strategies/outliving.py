"""What a rank keeps, gives to the others and puts back when a member of its run is lost.

A collective breaks, or a step boundary raises: so it is known how far a rank has come, and what it has not ended yet is
done again:

================================== ==================================================================================
a member was lost                  what the others do again
================================== ==================================================================================
before the first step              all, from the begin of the call
in a step                          the optimizer step, with buffers and random states as they were before it
after the step, such as in a save  what callbacks save then, and what is logged
in a validation                    that validation, with its metrics and with what saves or stops as before
at the end of an epoch             that end, likewise
================================== ==================================================================================

The most advanced member gives its state, as a checkpoint in memory, to those that are not at the same place.
"""

from __future__ import annotations

import copy
import csv
import gc
import inspect
import io
import json
import pickle
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._lightning import (
    Callback,
    CSVLogger,
    EarlyStopping,
    TrainerFn,
    TrainerStatus,
    convert_tensors_to_scalars,
)
from lightning_lockstep._system import write_report
from lightning_lockstep._text import counted, ranks_in_words
from lightning_lockstep._trainer import limited_batches
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.members import Membership
from lightning_lockstep.distributed.failure.record import FailureRecord, place_in_words
from lightning_lockstep.loaders.global_order import asked_sampler, bounds, kind_of, micro_batches, parts_of
from lightning_lockstep.loaders.weights import StepWeights
from lightning_lockstep.steps.patching import put_in_place
from lightning_lockstep.steps.snapshot import ModuleAttributes, RandomState
from lightning_lockstep.strategies.can_outlive import check_loader, check_optimizers

#: In place of the path of a checkpoint.
IN_MEMORY = "the memory of the ranks"
#: The file in which rank 0 keeps what was lost.
LOST_FILE = "lost.json"
_KEY, _POSITION = "lockstep_outliving", "lockstep_loader_position"
_ROWS_KEPT = 8
Row = tuple[int, dict[str, float]]  # the step, and what loggers are given
_NO_HOOKS = "", (-1, -1), list[Callable[[], object]]()


class Recovery:
    """What one rank knows of a call of a Trainer, so that it or another rank can go on from there."""

    def __init__(self, strategy: Any, membership: Membership) -> None:
        self.strategy, self.supervisor, self.membership = strategy, strategy.supervisor, membership
        self.trainer: Any = None
        self.memory: dict[str, Any] | None = None  # a checkpoint, until the run has begun from it
        self.saved: list[str] = []  # paths of checkpoints, in the hooks that run
        self._begins = False  # whether all ranks have the state of the run, and none has made a step
        self._in_run = False  # whether weights, optimizers and counters are those of the run
        self._attached: Any = None  # a Trainer that tells of its batches, hooks and logs
        self._at_begin = RandomState.capture()  # of the call
        self._before_step: tuple[int, list[Tensor], RandomState | None] = (-1, [], None)
        self._before_hooks = _NO_HOOKS  # which hooks run, since when, and what puts back what they change
        self._values: list[ModuleAttributes] = []  # logged in this epoch
        self._rows: deque[Row] = deque(maxlen=_ROWS_KEPT)  # logged last
        self._written: set[tuple[int, frozenset[str]]] = set()  # names of rows that were logged before a loss
        self._versions: list[Any] = []  # of rank 0's loggers
        self._tells = False  # whether it is still to be said that this rank goes on
        self._resumed: Mapping[str, Any] | None = None
        self._division: tuple[tuple[int, ...], int, int] | None = None  # of a loader that is being divided
        self._given: dict[str, Any] = {}  # settings of the Trainer that follow the number of ranks

    # -- a call of a Trainer, and while all is well --

    def begin_call(self, trainer: Any) -> None:
        """Note a further call of a Trainer."""
        self.trainer, self._in_run, self.memory, self._resumed = trainer, False, None, None
        self._at_begin, self._written = RandomState.capture(), set()

    def end_call(self) -> None:
        """Give the Trainer its own settings back."""
        for name, value in self._given.items():
            setattr(self.trainer, name, value)
        self._given = {}

    def run_begins(self) -> None:
        """Note that all ranks have the state of the run. Ranks: all, together; a broadcast."""
        trainer, connector = self.trainer, self.trainer._logger_connector
        check_optimizers(trainer.optimizers)
        self._begins = True
        folder = self.supervisor.folder()
        if trainer.is_global_zero and folder is not None and not self.membership.history:
            (folder / LOST_FILE).unlink(missing_ok=True)  # of an earlier run
        own = [logger.version if trainer.is_global_zero else None for logger in trainer.loggers]
        self._versions = current_communicator().broadcast(own)
        if self._attached is not trainer:
            self._attached, loop = trainer, trainer.fit_loop.epoch_loop.val_loop
            for owner, name, own_function in (
                (connector, "log_metrics", self._log),
                (connector, "on_batch_start", self._batch_begins),
                (connector, "epoch_end_reached", self._epoch_ends),
                (loop, "run", self._validates),
            ):
                put_in_place(owner, name, partial(own_function, getattr(owner, name)))

    def _batch_begins(self, begin: Callable[..., None], *args: Any) -> None:
        """Keep what a step that is broken off has changed by then: buffers and random states."""
        begin(*args)
        self.at_boundary()
        trainer = self.trainer
        if trainer.training and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            buffers = [one.detach().clone() for one in self.strategy.lightning_module.buffers()]
            self._before_step = trainer.global_step, buffers, RandomState.capture()
            self._before_hooks = _NO_HOOKS

    def _epoch_ends(self, reached: Callable[[], None]) -> None:
        if self.trainer.training:
            self.hooks_begin("epoch")
        reached()

    def _validates(self, run: Callable[[], Any]) -> Any:
        self.hooks_begin("validation")
        outputs = run()
        self._before_hooks = _NO_HOOKS
        return outputs

    def hooks_begin(self, where: str) -> None:
        """Keep what those callbacks have that save or stop, and for a validation metrics, before hooks change it."""
        self.at_boundary()
        kept: list[Callable[[], object]] = []
        for callback in filter(_decides, self.trainer.callbacks):
            attributes = {name: copy.copy(value) for name, value in vars(callback).items()}
            kept.append(partial(vars(callback).update, attributes))
        if where == "validation":
            kept += [ModuleAttributes(metric).restore for metric in self.strategy.counting.metrics()]
        self._before_hooks, self.saved = (where, self._place_of_hooks, kept), []

    @property
    def _place_of_hooks(self) -> tuple[int, int]:
        loop = self.trainer.fit_loop
        return loop.epoch_loop.batch_progress.total.ready, loop.epoch_progress.current.completed

    def _log(self, log: Callable[..., None], metrics: Any, step: int | None = None) -> None:
        """Log, but for a row of what is made again; keep it, because rank 0 alone writes it."""
        if not self.trainer.loggers or not metrics:
            return
        row = self._row(metrics, step)
        if _name_of(row) in self._written:
            self.trainer._logger_connector._logged_metrics.update(metrics)
            return
        log(metrics, step)
        self._rows.append(row)

    def _row(self, metrics: Mapping[str, Any], step: int | None) -> Row:
        """Return what Lightning gives to loggers."""
        scalars = dict(convert_tensors_to_scalars(metrics))
        if step is None and (given := scalars.pop("step", None)) is not None:
            return int(given), scalars
        if step is None:
            scalars.setdefault("epoch", self.trainer.current_epoch)
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        return step, scalars

    def at_boundary(self) -> None:
        """Note that the run has begun with a step or hooks; say, once, that this rank goes on after a loss."""
        if self._begins:  # until then the state in memory is the one to go on from
            self._begins, self._in_run, self.memory, self._values = False, True, None, []
        if not self._tells:
            return
        self._tells, history = False, self.membership.history
        history[-1].setdefault("seconds", round(time.time() - history[-1]["seen"], 3))
        for event in history:
            after = f" after {event['seconds']:.1f} s" if "seconds" in event else ""
            went_on = f"went on with {counted(event['went_on_with'], 'rank')}{after}"
            event["text"] = f"{event['who']} {event['at']} ({event['why']}); {went_on}; {event['lost']}"
        if self.trainer.is_global_zero:
            self.membership.say(history)
            if (folder := self.supervisor.folder()) is not None:
                write_report(folder / LOST_FILE, json.dumps({"lost": history}, indent=2) + "\n")

    # -- when a member is lost --

    def leave(self) -> None:
        """Let go of DDP, whose reducer holds the process group. Ranks: any, alone."""
        wrapped = None if self.strategy.model is None else weakref.ref(self.strategy.model)
        self.strategy.model = module = self.strategy.lightning_module
        if wrapped is not None and wrapped() not in (None, module):
            gc.collect()  # its hooks would fire in the next backward

    def connect(self) -> None:
        """Connect with the members of the present generation. Ranks: all members, together."""
        self.strategy.setup_environment()

    def share_state(self, call: inspect.BoundArguments) -> None:
        """Make all members go on where the most advanced one is. Ranks: all members, together."""
        communicator, membership = current_communicator(), self.membership
        if self._in_run and self.trainer.state.fn == TrainerFn.FITTING:
            self.memory = self._dump()
        self._in_run = self._begins = False
        place = (0,) if self.memory is None else self.memory[_KEY]["place"]
        told = communicator.gather((place, membership.history, StepWeights._fits, membership.lost()))
        places = [one[0] for one in told]
        source = places.index(max(places))
        # Whether a rank has gone on after the last loss, each knows of itself.
        histories = (one[1] for one in told)
        membership.history = max(histories, key=lambda one: (len(one), bool(one) and "seconds" in one[-1]))
        StepWeights._fits = max(one[2] for one in told)
        if len(set(places)) > 1:
            self.memory = _given_by(source, self.memory)
        lost, since = told[source][3]
        if lost:
            self._note(lost, since)
            self._renew()
        if self.memory is None:
            self._at_begin.restore()
        else:
            call.arguments["ckpt_path"] = IN_MEMORY

    def _dump(self) -> dict[str, Any]:
        """Return a checkpoint of what this rank has ended. Ranks: any, alone; hooks run as after an error."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        where, place, kept = self._before_hooks
        progress, connector = loop.epoch_loop.batch_progress.current, trainer._logger_connector
        is_open = (
            place == self._place_of_hooks
            and {
                "": False,
                "batch": trainer.training and progress.processed > progress.completed,
                "validation": not trainer.training,
                "epoch": trainer.training,
            }[where]
        )
        row: Row | None = None
        if is_open and where == "batch" and connector.should_update_logs:
            with suppress(Exception):  # of values that no step has logged yet
                row = self._row(connector.metrics["log"], None)
        for put_back in kept if is_open else ():
            put_back()
        step, buffers, _ = self._before_step
        if step == trainer.global_step:
            with torch.no_grad():
                for buffer, before in zip(self.strategy.lightning_module.buffers(), buffers, strict=False):
                    buffer.copy_(before)
        self._values = [ModuleAttributes(one) for one in loop.epoch_loop._results.values()]
        status, trainer.state.status = trainer.state.status, TrainerStatus.INTERRUPTED
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        trainer.state.status = status
        _settle(checkpoint["loops"]["fit_loop"], where if is_open else "", is_training=trainer.training)
        for record in checkpoint.get(_POSITION, {}).get("ranks", ()):
            metrics = connector._callback_metrics.items()
            record["metrics"] = {name: torch.as_tensor(value).cpu() for name, value in metrics}
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        checkpoint[_KEY] = {
            "place": self._place(),
            "at": place_in_words(at if trainer.training else {**at, "stage": "validate"}),
            "should_stop": trainer.should_stop,
            "versions": self._versions,
            "rows": list(self._rows),
            "open_row": row,
            "saves_again": is_open and where == "batch",
            "saved": self.saved if is_open else [],
            "callbacks": [_plain(vars(one)) for one in filter(_decides, trainer.callbacks)],
        }
        return checkpoint

    def _place(self) -> tuple[int, ...]:
        """Return how far this rank has come, comparable with that of others."""
        epochs, inner = self.trainer.fit_loop.epoch_progress.current, self.trainer.fit_loop.epoch_loop
        batches, validated = inner.batch_progress.total, inner.val_loop.batch_progress.total.completed
        scheduled, stepped = inner.scheduler_progress.total.completed, inner._batches_that_stepped
        done = epochs.processed, batches.processed, scheduled, batches.completed, validated
        return 1, self.trainer.global_step, *done, epochs.completed, stepped

    def _note(self, lost: Sequence[FailureRecord], since: float) -> None:
        """Add losses to the history, or end the run if they come again at the same step. Ranks: all, together."""
        at = f"in {self.trainer.state.fn.value}" if self.memory is None else f"at {self.memory[_KEY]['at']}"
        history, ranks = self.membership.history, sorted(record.rank for record in lost)
        if self.memory and history and history[-1]["at"] == at and "seconds" in history[-1]:
            before = f"{lost[-1].summary} {at}; {history[-1]['who']} there before ({history[-1]['why']})"
            self.membership.end_run(replace(lost[-1], summary=before), self.supervisor.propagation)
        signals = dict.fromkeys(one.summary.removeprefix("killed by ").partition(" ")[0] for one in lost)
        event = {
            "who": f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} lost",
            "ranks": ranks,
            "started": lost[0].world_size,
            "pids": [record.pid for record in lost],
            "why": ", ".join(signals),
            "at": at,
            "went_on_with": current_communicator().world_size,
            "seen": since,
            "lost": "nothing was lost" if self.memory else "the call of the Trainer began again",
        }
        self.membership.history, self._tells = [*history, event], True

    def _renew(self) -> None:
        """Bring the Trainer back to where its function can be called again."""
        trainer, module = self.trainer, self.strategy.lightning_module
        fits = trainer.state.fn == TrainerFn.FITTING
        loop: Any = trainer.fit_loop.epoch_loop.val_loop if fits else trainer._active_loop
        if not trainer.training and hasattr(loop, "_module_mode"):
            with suppress(Exception):  # the loop had not begun
                loop._module_mode.restore(module)
        # Lightning's redirection of `forward`, which nobody has undone if DDP's own part of the forward has raised.
        vars(module).pop("forward", None)
        module.zero_grad(set_to_none=True)
        if fits:
            trainer.training = True
            loop._has_run = False  # else Lightning takes the validation of the epoch for done
        trainer._teardown()
        trainer.state.status = TrainerStatus.RUNNING
        if hasattr(loop, "_results"):
            loop._results.reset()
        if trainer.is_global_zero and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.enable()
        self.end_call()
        if self.memory is not None:
            known = self.memory[_KEY]
            trainer.should_stop = known["should_stop"]
            # What their state does not have, such as at which step they have saved last.
            for callback, values in zip(
                filter(_decides, trainer.callbacks), known["callbacks"], strict=False
            ):
                vars(callback).update(values)
            self._take_over_logs(known)
            for path in known["saved"]:  # callbacks save these again, and would give them other names
                self.strategy.remove_checkpoint(path)

    def _take_over_logs(self, known: Mapping[str, Any]) -> None:
        """Let the loggers of this rank, if it is the new rank 0, go on where those of the lost one ended."""
        trainer, rows = self.trainer, [*known["rows"], *filter(None, [known["open_row"]])]
        self._rows, self._written = deque(rows, maxlen=_ROWS_KEPT), set(map(_name_of, rows))
        for logger, version in zip(trainer.loggers, known["versions"], strict=False):
            if hasattr(logger, "_version"):
                logger._version = version
            if trainer.is_global_zero and isinstance(logger, CSVLogger):
                self._written |= _continue_csv(logger, rows)
            elif trainer.is_global_zero and known["open_row"]:
                logger.log_metrics(metrics=known["open_row"][1], step=known["open_row"][0])

    def checkpoint(self) -> dict[str, Any]:
        """Return the checkpoint in memory, for Lightning, which changes its loops."""
        assert self.memory is not None
        self._resumed = self.memory[_KEY]
        return {**self.memory, "loops": copy.deepcopy(self.memory["loops"])}

    def train_starts(self) -> None:
        """Save again what was not saved when a member was lost, and go on with the random states of the step."""
        known, self._resumed = self._resumed, None
        if known is None:
            return
        trainer, (step, _, states) = self.trainer, self._before_step
        if states is not None and step == trainer.global_step:
            states.restore()
        for values in self._values:
            values.restore()
        for callback in trainer.checkpoint_callbacks if known["saves_again"] else ():
            number = trainer.fit_loop.epoch_loop.batch_idx
            callback.on_train_batch_end(trainer, self.strategy.lightning_module, None, None, number)

    # -- the global batch of the start --

    def divide(self, loader: Any) -> None:
        """Divide the global batch of the start among the ranks that are left. Ranks: all; nothing is sent."""
        # In more micro-batches rather than in larger ones, so that memory does not grow. If batch norm follows the
        # micro-batch, that stays as it was.
        check_loader(loader)
        strategy, trainer, kind = self.strategy, self.trainer, kind_of(loader)
        started, ranks = strategy.num_processes, strategy.world_size
        if ranks == started or strategy.micro_batches is not None:
            return
        unit = asked_sampler(loader.batch_sampler).batch_size if kind == "samples" else 1
        accumulated, sizes = trainer.accumulate_grad_batches, (unit * started,)
        if strategy.settings.batch_norm == "of_rank":
            total = unit * started * accumulated
            strategy.micro_batches = micro_batches(total, -(-total // (ranks * unit)))
            self._set(accumulate_grad_batches=len(strategy.micro_batches))
            self._division = sizes, len(strategy.micro_batches), accumulated
        else:
            strategy.micro_batches = sizes

    def schedule(self, loader: Any) -> None:
        """Let an epoch end, and validations come, after as many samples as at the start."""
        trainer, parts, division = self.trainer, parts_of(loader), self._division
        self._division, every = None, trainer.val_check_interval
        if division is None:
            return
        sizes, count, accumulated = division
        at_start = len(bounds(parts.position(len(parts)), sizes)) - 1
        limited = limited_batches(trainer, at_start)
        if limited < at_start:
            self._set(limit_train_batches=int(limited * count // accumulated))
        if isinstance(every, (int, float)):  # else it is by the clock
            number = every if isinstance(every, int) else max(1, int(limited * every))
            self._set(val_check_interval=1.0 if number >= limited else int(number * count // accumulated))

    def _set(self, **values: Any) -> None:
        """Change settings of the Trainer for as long as these ranks are the members."""
        for name, value in values.items():
            self._given.setdefault(name, getattr(self.trainer, name))
            setattr(self.trainer, name, value)


def _settle(loops: dict[str, Any], open_hooks: str, *, is_training: bool) -> None:
    """Have counters that were saved say what is to be made again."""
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    if not is_training:  # a validation, even if all of its batches are done
        loops["epoch_loop.val_loop.batch_progress"]["is_last_batch"] = False
    elif open_hooks == "epoch":
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        is_counted = epochs["current"]["processed"] > epochs["current"]["completed"]
        for counters in (epochs["total"], epochs["current"]) if is_counted else ():
            counters["processed"] -= 1
    elif (
        0 < batches["current"]["completed"] == batches["current"]["ready"]
    ):  # all that follows the batch is done
        for counters in (batches["total"], batches["current"]):
            counters["ready"] += 1


def _decides(callback: Callback) -> bool:
    """Return whether a callback saves checkpoints or stops the fit."""
    return hasattr(callback, "_last_global_step_saved") or isinstance(callback, EarlyStopping)


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    kinds = bool, int, float, str, type(None)
    return {name: value for name, value in attributes.items() if isinstance(value, kinds)}


# -- A state, sent without a copy of its tensors --


class _Sender(pickle.Pickler):
    """Writes a state without its tensors, which it lists."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return str(value.dtype).removeprefix("torch."), tuple(value.shape)


class _Receiver(pickle.Unpickler):
    """Reads such a state, with empty tensors, which it lists."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, told: Any) -> Tensor:
        self.tensors.append(torch.empty(told[1], dtype=getattr(torch, told[0])))
        return self.tensors[-1]


def _given_by(source: int, state: Any) -> Any:
    """Return the state of a rank. Ranks: all, together; a broadcast, and one for each tensor."""
    communicator, file = current_communicator(), io.BytesIO()
    sender = _Sender(file)
    if communicator.rank == source:
        sender.dump(state)
    receiver = _Receiver(io.BytesIO(communicator.broadcast(file.getvalue(), source)))
    if communicator.rank != source:
        state = receiver.load()
    communicator.broadcast_tensors(sender.tensors or receiver.tensors, source)
    return state


# -- metrics.csv --


def _name_of(row: tuple[int, Mapping[str, Any]]) -> tuple[int, frozenset[str]]:
    """Return what tells a row that a logger is given from others."""
    names = (name for name, value in row[1].items() if value != "" and name not in ("step", "epoch"))
    return row[0], frozenset(names)


def _continue_csv(logger: Any, rows: Sequence[Row]) -> set[tuple[int, frozenset[str]]]:
    """Have a CSV logger append to the file of its version; write the rows that are not there; return what was."""
    path = Path(logger.log_dir) / "metrics.csv"
    aside, text = path.with_suffix(".csv.kept"), b""
    if logger._experiment is None:
        if path.is_file():
            path.replace(aside)
        with warnings.catch_warnings():  # that Lightning would delete the file
            warnings.simplefilter("ignore")
            writer = logger.experiment
        if aside.is_file():
            text = aside.read_bytes()
            aside.write_bytes(text[: text.rfind(b"\n") + 1])  # the lost rank may have ended within a line
            aside.replace(path)
            writer.metrics_keys = next(csv.reader(io.StringIO(text.decode())), [])
    there = set[tuple[int, frozenset[str]]]()
    if path.is_file():
        with path.open(newline="") as file:
            there = {_name_of((int(row["step"] or 0), row)) for row in csv.DictReader(file)}
    for row in rows:
        if _name_of(row) not in there:
            logger.log_metrics(metrics=row[1], step=row[0])
    logger.save()
    return there
