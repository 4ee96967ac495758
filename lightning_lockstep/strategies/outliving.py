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
import json
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_lockstep._lightning import (
    Callback,
    ClusterEnvironment,
    CSVLogger,
    EarlyStopping,
    ExperimentWriter,
    TrainerFn,
    TrainerStatus,
    convert_tensors_to_scalars,
)
from lightning_lockstep._system import write_report, write_whole
from lightning_lockstep._text import counted, ranks_in_words
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.distributed.failure.members import Membership
from lightning_lockstep.distributed.failure.record import place_in_words
from lightning_lockstep.distributed.process_group import broadcast_tensors
from lightning_lockstep.launchers.environments import SlurmNodeEnvironment, SlurmStepEnvironment
from lightning_lockstep.launchers.outliving import OutlivingLauncher
from lightning_lockstep.loaders.weights import StepWeights
from lightning_lockstep.steps.patching import do_nothing, put_in_place
from lightning_lockstep.steps.snapshot import BufferCopies, ModuleAttributes, RandomState
from lightning_lockstep.strategies.can_outlive import GlobalBatch, check_fit, check_optimizers, check_start
from lightning_lockstep.strategies.startup import RankStartup

#: In place of the path of a checkpoint.
IN_MEMORY = "the memory of the ranks"
#: The file in which rank 0 keeps what was lost.
LOST_FILE = "lost.json"
_KEY, _POSITION = "lockstep_outliving", "lockstep_loader_position"
_ROWS_KEPT = 8
Row = tuple[int | None, frozenset[str]]  # what tells it from others: the step, and names of the values


@dataclass
class _Hooks:
    """Hooks that run, and what puts back what they change."""

    where: Literal["", "batch", "validation", "epoch"] = (
        ""  # after a batch, in a validation, at the end of an epoch
    )
    kept: list[Callable[[], object]] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)  # paths of checkpoints


class Recovery:
    """What one rank knows of a call of a Trainer, so that it or another rank can go on from there."""

    def __init__(self, strategy: Any, membership: Membership) -> None:
        self.strategy, self.supervisor, self.membership = strategy, strategy.supervisor, membership
        self.trainer: Any = None
        self.memory: dict[str, Any] | None = None  # a checkpoint, until the run has begun from it
        self._in_run = False  # whether weights, optimizers and counters are those of the run
        self._attached: Any = None  # a Trainer that tells of its batches, hooks and logs
        self._at_begin = RandomState.capture()  # of the call
        self._before_step = -1, self._at_begin  # number, and random states
        self._buffers: BufferCopies | None = None  # before the step
        self._hooks = _Hooks()  # that run now: a loss has them run again
        self._values: list[ModuleAttributes] = []  # logged in this epoch
        self._rows: dict[Row, dict[str, Any]] = {}  # that loggers were given last, for the next rank 0
        self._written: set[Row] = set()  # rows that were logged before a loss, and are not to be logged again
        self._made_again = -1  # the last step that is made again
        self._loss: dict[str, Any] | None = None  # what is still to be said of it
        self._batch = GlobalBatch(strategy)
        self._attach(
            strategy,
            barrier=self._barrier,
            load_checkpoint=self._loads,
            save_checkpoint=self._saves,
            process_dataloader=self._batch.process,
            on_train_start=self._train_starts,
            optimizer_step=self._steps,
        )

    # -- a call of a Trainer, and while all is well --

    def begin_call(self, trainer: Any) -> None:
        """Note a further call of a Trainer."""
        self.trainer = self._batch.trainer = trainer
        self._in_run, self.memory = False, None
        self._at_begin, self._written = RandomState.capture(), set()

    def end_call(self) -> None:
        """Give the Trainer its own settings back, and log what comes again in another call."""
        self._batch.put_back()
        self._written = set()

    def _attach(self, owner: object, **functions: Callable[..., Any]) -> None:
        """Have functions called in place of those of the same name, which they get first."""
        for name, function in functions.items():
            put_in_place(owner, name, partial(function, getattr(owner, name)))

    def _barrier(self, wait: Callable[..., None], name: str | None = None, **options: Any) -> None:
        self.strategy.check_failure()  # else a rank would go on where others have broken off
        wait(name, **options)
        if name == "run-stage":  # all ranks have the state of the run
            self._run_begins()

    def _run_begins(self) -> None:
        trainer, self.supervisor.in_batches = self.trainer, True
        check_optimizers(trainer.optimizers)
        folder = self.supervisor.folder()
        if trainer.is_global_zero and folder is not None and not self.membership.told():
            (folder / LOST_FILE).unlink(missing_ok=True)  # of an earlier run
        # Each rank may become rank 0, whose loggers go on in the same place.
        loggers = [logger for logger in trainer.loggers if hasattr(logger, "_version")]
        versions = [logger.version if trainer.is_global_zero else None for logger in loggers]
        for logger, version in zip(loggers, current_communicator().broadcast(versions), strict=False):
            logger._version = version
        self._buffers = BufferCopies(trainer.lightning_module, trusts_versions=False)
        if self._attached is trainer:
            return
        self._attached = trainer
        # Between these calls of Lightning's connector the hooks of all callbacks run.
        self._attach(
            trainer._logger_connector,
            on_batch_start=self._batch_begins,
            update_train_step_metrics=self._hooks_end,
            epoch_end_reached=self._epoch_ends,
            update_train_epoch_metrics=self._hooks_end,
        )
        self._attach(trainer.fit_loop.epoch_loop.val_loop, run=self._validates)
        for logger in trainer.loggers:
            self._attach(logger, log_metrics=self._log)

    def _steps(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        self._hooks_begin("batch")
        return result

    def _saves(self, save: Callable[..., None], checkpoint: Any, path: Any, **options: Any) -> None:
        if self._hooks.where:
            self._hooks.saved.append(path)
        save(checkpoint, path, **options)

    def _batch_begins(self, begin: Callable[..., None], *args: Any) -> None:
        """Keep what a step that is broken off has changed by then: buffers and random states."""
        begin(*args)
        self._at_boundary()
        trainer = self.trainer
        if trainer.training and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            assert self._buffers is not None
            self._buffers.refresh()
            if trainer.global_step > self._made_again:
                self._written = set()
            self._before_step = trainer.global_step, RandomState.capture()

    def _epoch_ends(self, reached: Callable[[], None]) -> None:
        if self.trainer.training:
            self._hooks_begin("epoch")
        reached()

    def _validates(self, run: Callable[[], Any]) -> Any:
        self._hooks_begin("validation")
        outputs = run()
        self._hooks = _Hooks()
        return outputs

    def _hooks_begin(self, where: Literal["batch", "validation", "epoch"]) -> None:
        """Keep what those callbacks have that save or stop, and for a validation metrics, before hooks change it."""
        self._at_boundary()
        kept: list[Callable[[], object]] = []
        for callback in filter(_decides, self.trainer.callbacks):
            attributes = {name: copy.copy(value) for name, value in vars(callback).items()}
            kept.append(partial(vars(callback).update, attributes))
        if where == "validation":
            kept += [ModuleAttributes(metric).restore for metric in self.strategy.counting.metrics()]
        self._hooks = _Hooks(where, kept)

    def _hooks_end(self, update: Callable[[], None]) -> None:
        self._hooks = _Hooks()
        update()

    def _log(
        self, log: Callable[..., None], metrics: Mapping[str, Any], step: int | None = None, **options: Any
    ) -> None:
        """Log, but for a row of what is made again; keep it, because rank 0 alone writes it."""
        row = _row(step, metrics)
        if step is None or row not in self._written:  # a row of the program's own may have no step
            log(metrics=metrics, step=step, **options)
        if step is not None and row not in self._written:
            self._rows = dict([*self._rows.items(), (row, dict(metrics))][-_ROWS_KEPT:])

    def _at_boundary(self) -> None:
        """Note that the run has begun with a step or hooks; say, once, that this rank goes on after a loss."""
        if not self._in_run:  # until then the state in memory is the one to go on from
            self._in_run, self.memory, self._values = True, None, []
        if self._loss is None:
            return
        loss, self._loss = self._loss, None
        loss["seconds"] = round(time.time() - loss["seen"], 3)
        loss["text"] = _in_words(loss)
        self.membership.tell(loss)
        if self.trainer.is_global_zero and (folder := self.supervisor.folder()) is not None:
            told = json.dumps({"lost": self.membership.told()}, indent=2)
            write_report(folder / LOST_FILE, f"{told}\n")

    # -- when a member is lost --

    def leave(self) -> None:
        """Let go of DDP, whose reducer holds the process group. Ranks: any, alone."""
        wrapped = None if self.strategy.model is None else weakref.ref(self.strategy.model)
        self.strategy.model = module = self.strategy.lightning_module
        if wrapped is not None and wrapped() not in (None, module):
            gc.collect()  # its hooks would fire in the next backward

    def share_state(self, call: inspect.BoundArguments) -> None:
        """Make all members go on where the most advanced one is. Ranks: all members, together."""
        if self._in_run and self.trainer.state.fn == TrainerFn.FITTING:
            self.memory = self._dump()
        self._in_run, self._hooks = False, _Hooks()
        place = (0,) if self.memory is None else self.memory[_KEY]["place"]
        told = current_communicator().gather((place, StepWeights._fits))
        places = [one[0] for one in told]
        StepWeights._fits = max(one[1] for one in told)
        if len(set(places)) > 1:
            self.memory = _given_by(places.index(max(places)), self.memory)
        self._note_losses()
        if self.membership.current.number:
            self._renew()
        if self.memory is None:
            self._at_begin.restore()
        else:
            call.arguments["ckpt_path"] = IN_MEMORY

    def _dump(self) -> dict[str, Any]:
        """Return a checkpoint of what this rank has ended. Ranks: any, alone; hooks run as after an error."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        connector, hooks = trainer._logger_connector, self._hooks
        row = None
        if hooks.where == "batch" and connector.should_update_logs:
            with suppress(Exception):  # of values that no step has logged yet
                logged = convert_tensors_to_scalars(connector.metrics["log"])
                metrics = {"epoch": trainer.current_epoch, **logged}
                row = int(metrics.pop("step", loop.epoch_loop._batches_that_stepped)), metrics
        for put_back in hooks.kept:
            put_back()
        if self._before_step[0] == trainer.global_step and self._buffers is not None:
            self._buffers.restore()
        self._values = [ModuleAttributes(one) for one in loop.epoch_loop._results.values()]
        status, trainer.state.status = trainer.state.status, TrainerStatus.INTERRUPTED
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        trainer.state.status = status
        validates = hooks.where == "epoch" and loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        _settle(
            checkpoint["loops"]["fit_loop"], hooks.where, is_training=trainer.training, validates=validates
        )
        for record in checkpoint.get(_POSITION, {}).get("ranks", ()):
            monitored = connector._callback_metrics.items()
            record["metrics"] = {name: torch.as_tensor(value).cpu() for name, value in monitored}
        at = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        checkpoint[_KEY] = {
            "place": self._place(),
            "at": place_in_words({**at, "stage": "validate"} if trainer.evaluating else at),
            "should_stop": trainer.should_stop,
            "rows": self._rows,
            "open_row": row,
            "saves_again": hooks.where == "batch",
            "saved": hooks.saved,
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

    def _note_losses(self) -> None:
        """Note what is to be said of losses, or end the run if they come again at one step. Ranks: all, together."""
        membership, told, self._loss = self.membership, self.membership.told(), None
        lost = membership.lost_since(told[-1]["generation"] if told else 0)
        members = len(membership.current.members)
        if not (lost or (told and members > told[-1]["went_on_with"])):  # a process has joined
            return
        at = f"in {self.trainer.state.fn.value}" if self.memory is None else f"at {self.memory[_KEY]['at']}"
        there = [one["text"] for one in told if one["ranks"] and one["at"] == at]
        if self.memory and lost and there:
            membership.ask(f"it was not the first one there: {there[-1]}")
            raise membership.error()
        reasons = (
            f"host {record.host}"
            if record.kind == "vanished"
            else record.summary.removeprefix("killed by ").partition(" ")[0]
            for _, record in lost
        )
        self._loss = {
            "generation": membership.current.number,
            "ranks": sorted(record.rank for _, record in lost),
            "pids": [record.pid for _, record in lost],
            "why": ", ".join(dict.fromkeys(reasons)),
            "at": at,
            "went_on_with": members,
            "seen": (lost[0][0] if lost else membership.current).since,
        }

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
            callbacks = filter(_decides, trainer.callbacks)
            for callback, values in zip(callbacks, known["callbacks"], strict=False):
                vars(callback).update(values)
            for path in known["saved"]:  # callbacks save these again, and would give them other names
                self.strategy.remove_checkpoint(path)
            self._rows, self._written, self._made_again = known["rows"], set(), known["place"][1]
            loggers = [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]
            there = [_continue_csv(one, known["rows"]) for one in loggers if trainer.is_global_zero]
            self._written = set[Row]().union(known["rows"], *there)

    def _loads(self, load: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        if path != IN_MEMORY:
            return load(path, *args, **options)
        assert self.memory is not None
        return {**self.memory, "loops": copy.deepcopy(self.memory["loops"])}  # which Lightning changes

    def _train_starts(self, start: Callable[[], None]) -> None:
        """Save and log again what was not when a member was lost; go on with the random states of the step."""
        start()
        if self.memory is None:
            return
        known, trainer, (step, states) = self.memory[_KEY], self.trainer, self._before_step
        if step == trainer.global_step:
            states.restore()
        for values in self._values:
            values.restore()
        for callback in trainer.checkpoint_callbacks if known["saves_again"] else ():
            number = trainer.fit_loop.epoch_loop.batch_idx
            callback.on_train_batch_end(trainer, self.strategy.lightning_module, None, None, number)
        for logger in trainer.loggers if known["open_row"] else ():
            logger.log_metrics(metrics=known["open_row"][1], step=known["open_row"][0])
            logger.save()


class OutlivingStartup(RankStartup):
    """How the ranks are started and connected if the others outlive one that is lost."""

    outlives = True
    # They connect when all have said that they are ready, and a rank that is lost just then is waited for.
    connect_within = timedelta(seconds=5)
    _recovery: Recovery | None = None
    check_call = staticmethod(check_fit)  # called in the first process, before it starts any rank

    def environment(self, *, mpi: bool) -> ClusterEnvironment:
        """See :meth:`RankStartup.environment`; the one task that srun has started on each node is no rank."""
        found = super().environment(mpi=mpi)
        if isinstance(found, SlurmStepEnvironment) and set(found.here.per_node) == {1}:
            return SlurmNodeEnvironment(found.here)
        return found

    def launcher(self, strategy: Any) -> Any:
        """See :meth:`RankStartup.launcher`."""
        if strategy.num_processes * strategy.num_nodes == 1:
            return super().launcher(strategy)
        check_start(strategy)
        return OutlivingLauncher(strategy)

    def recovery(self, strategy: Any, membership: Membership, trainer: Any) -> Recovery:
        """Return what lets a call of a Trainer go on without ranks that are lost. Ranks: all; nothing is sent."""
        self._recovery = self._recovery or Recovery(strategy, membership)
        self._recovery.begin_call(trainer)
        return self._recovery


def _settle(loops: dict[str, Any], open_hooks: str, *, is_training: bool, validates: bool) -> None:
    """Have counters that were saved say what is to be made again."""
    batches, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]
    if not is_training:  # a validation, even if all of its batches are done
        loops["epoch_loop.val_loop.batch_progress"]["is_last_batch"] = False
    elif open_hooks == "epoch":
        if validates:  # a resumed loop comes to this validation, leaves it out and counts the step once more
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


def _in_words(loss: Mapping[str, Any]) -> str:
    """Return what is printed of a loss."""
    verb = "was" if len(loss["ranks"]) == 1 else "were"
    went_on = f"went on with {counted(loss['went_on_with'], 'rank')} after {loss['seconds']:.1f} s"
    again = "nothing was lost" if loss["at"].startswith("at") else "the call of the Trainer began again"
    if not loss["ranks"]:
        return f"a new process joined {loss['at']}; {went_on}"
    return f"{ranks_in_words(loss['ranks'])} {verb} lost {loss['at']} ({loss['why']}); {went_on}; {again}"


def _given_by(source: int, state: Any) -> Any:
    """Return the state of a rank. Ranks: all, together; a broadcast, and one for each tensor."""
    communicator = current_communicator()
    if communicator.rank == source:  # without a copy of its tensors
        shapes = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), state)
        communicator.broadcast(shapes, source)
    else:
        shapes = communicator.broadcast(None, source)
        state = pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one, device="cpu"), shapes)
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    broadcast_tensors(tensors, source=source)
    return state


# -- metrics.csv --


def _row(step: int | None, values: Mapping[str, Any]) -> Row:
    names = (name for name, value in values.items() if value != "" and name not in ("step", "epoch"))
    return step, frozenset(names)


def _continue_csv(logger: Any, rows: Mapping[Row, Mapping[str, Any]]) -> set[Row]:
    """Have a CSV logger append to the file of its version; write the rows that are not there; return what was."""
    kind: Any = ExperimentWriter
    deletes, kind._check_log_dir_exists = kind._check_log_dir_exists, do_nothing
    try:
        writer = logger.experiment
    finally:
        kind._check_log_dir_exists = deletes  # which would delete the file
    path, there = Path(logger.log_dir) / "metrics.csv", set[Row]()
    if path.is_file():
        text = path.read_bytes()
        write_whole(path, text[: text.rfind(b"\n") + 1])  # the lost rank may have ended within a line
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            there = {_row(int(row["step"] or 0), row) for row in reader}
            writer.metrics_keys = list(reader.fieldnames or ())
    for row, values in rows.items():
        if row not in there:
            logger.log_metrics(metrics=values, step=row[0])
    writer.save()
    return there
