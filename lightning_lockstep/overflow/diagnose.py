"""Which module made the first bad value, and what is done about the step."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed import Communicator
from lightning_lockstep.distributed.failure.process_exit import outcome
from lightning_lockstep.distributed.local_collectives import UnansweredCollectiveError
from lightning_lockstep.errors import OverflowDetectedError
from lightning_lockstep.numerics.statistics import has_bad_values, tensor_statistics
from lightning_lockstep.overflow.frames import FrameRecorder, Producer
from lightning_lockstep.overflow.replay import OUTSIDE, Remedy, StepRecord, advice, replay, search
from lightning_lockstep.overflow.report import RankReport, ReportPublisher
from lightning_lockstep.overflow.settings import OverflowSettings
from lightning_lockstep.steps.capabilities import (
    EngineGradients,
    capabilities_of,
    missing_capabilities,
)

_log = logging.getLogger(__name__)
_TOGETHER = (
    "all ranks replayed a batch whose loss or gradients are not finite, to find the module that made them so."
)


class Counters(Protocol):
    """What the callback counts; the same on every rank but for the reports."""

    skipped_steps: int  # of the optimizer
    scaler_skips: int  # ordinary ones of an fp16 loss scaler
    bad_in_a_row: int  # optimizer steps with a hit since the last one without
    reports: list[RankReport]


@dataclass
class Response:
    """What a hit leads to on one rank: the batch is replayed and reported, then all ranks raise, warn or skip."""

    trainer: Trainer
    module: LightningModule
    settings: OverflowSettings
    communicator: Communicator
    publisher: ReportPublisher
    counters: Counters
    engine: EngineGradients | None = None  # keeps the gradients and makes the steps, if there is one

    def to_common_hit(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Act on a hit that every rank knows of, at the same optimizer step; ``record`` is replayed."""
        why = self._why_alarm(record)
        if why is None:
            self.counters.scaler_skips += 1
            return
        self.counters.bad_in_a_row += 1
        in_a_row = self.counters.bad_in_a_row
        text = ""
        if in_a_row == 1:
            report = self._replayed(record, self._known(record))
            self.counters.reports.append(report)
            with outcome.writes_report:
                text = self.publisher.publish(report, why)
        if self.settings.action == "raise":
            raise OverflowDetectedError(text)
        if self.settings.action == "skip":
            self._skip(optimizer, record)
        elif in_a_row > 1 and in_a_row & (in_a_row - 1) == 0 and self.communicator.is_main:
            _log.warning("nan or inf in %d optimizer steps in a row; see the report above", in_a_row)

    def _why_alarm(self, record: StepRecord) -> str | None:
        """Return why this is an alarm, the same on every rank; ``None`` for an ordinary skip of a loss scaler."""
        if self.engine is not None:
            scaling = self.engine.loss_scale()
        else:
            scaling = None if self._scaler is None else (float(self._scaler.get_scale()), 0.0)
        if scaling is None:
            return self._what_is_bad(record)
        scale, floor = scaling
        bad = any(map(has_bad_values, (record.loss, record.activation_flag)))
        entries = self.publisher.collect({"forward": bad, "scale": scale}).entries.values()
        if any(entry["forward"] for entry in entries):
            return "the forward is not finite, which no loss scale can fix"
        lowest = min(entry["scale"] for entry in entries)
        if lowest <= max(floor, self.settings.scale_floor):
            return f"gradients are not finite although the loss scale is down to {lowest:g}"
        too_many = None if self.engine is None else self.engine.why_skips_are_too_many()
        return None if too_many is None else too_many.rstrip(".")

    def _what_is_bad(self, record: StepRecord) -> str:
        """Return what was seen, the same on every rank; mark gradients that this detector itself has made nan."""
        flags = {"activation": has_bad_values(record.activation_flag), "loss": self._is_bad(record.loss)}
        if self.settings.mode != "hooks":
            return "the loss or the gradients are not finite"
        entries = self.publisher.collect(flags).entries.values()
        if not any(entry["activation"] for entry in entries) or any(entry["loss"] for entry in entries):
            return "the loss or the gradients are not finite"
        if self.communicator.world_size > 1 and self.engine is None and self.settings.action != "warn":
            record.made_nan = True
        return "an output of a module is not finite, although the loss is"

    def _is_bad(self, loss: Tensor | None) -> bool:
        return has_bad_values(loss, allow_inf=self.settings.allowed.match("loss"))

    @property
    def _scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def _skip(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Skip this optimizer step: without gradients an optimizer changes nothing."""
        if self.engine is not None:
            self.engine.skip_step(optimizer)
        else:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        counters = self.counters
        counters.skipped_steps += 1
        record.skipped = True
        if self.communicator.is_main:
            _log.warning(
                "optimizer step %d skipped because of nan or inf (%d so far, %d in a row)",
                self.trainer.global_step,
                counters.skipped_steps,
                counters.bad_in_a_row,
            )
        if counters.bad_in_a_row >= self.settings.max_skips:
            raise OverflowDetectedError(
                f"{counters.bad_in_a_row} optimizer steps in a row were skipped because of nan or inf, as many as"
                f" max_skips={self.settings.max_skips} allows. Reports are in {self.publisher.folder}."
            )

    # -- Which module made the first bad value --

    def _replayed(self, record: StepRecord, report: RankReport) -> RankReport:
        """Add to a report what a replay shows."""
        # Collectives of the step are answered on this rank. If that shows no bad value on any rank, all replay it
        # once more with real collectives. If the parameters are divided among the ranks, all replay it together
        # from the beginning.
        strategy = self.trainer.strategy
        missing = missing_capabilities(strategy, "step_alone")
        if missing and not hasattr(strategy, "engine_gradients"):
            report.notes.append(f"Not replayed: on {type(strategy).__name__}, {missing[0]}.")
            return report
        recorder = self._replay_together(record) if self.divided else self._replay(record, alone=True)
        if recorder.alone and self._only_together(recorder):
            recorder = self._replay(record, alone=False)
        report.notes += self._notes(recorder, record)
        self._add_findings(report, recorder, record)
        report.remedy = self._remedy(report, record, recorder)
        return report

    @property
    def divided(self) -> bool:
        return capabilities_of(self.trainer.strategy).replays == "together"

    def _replay_together(self, record: StepRecord) -> FrameRecorder:
        """Replay with parameters gathered from all ranks."""
        # The others wait for the part of a rank that fails, unless they fail at the same place or have finished.
        recorder = self._replay(record, alone=False)
        if self.publisher.all_arrive():
            return recorder
        if recorder.error is None:
            raise RuntimeError(f"Another rank did not finish the replay. ({_TOGETHER})")
        note = getattr(recorder.error, "add_note", str)  # from Python 3.11 on
        note(f"Raised in a replay: {_TOGETHER}")
        raise recorder.error

    def _replay(self, record: StepRecord, *, alone: bool) -> FrameRecorder:
        recorder = FrameRecorder(self.module, self.settings, divided=self.divided)
        try:
            replay(self.trainer, self.module, record, recorder, answer_collectives=alone)
        except Exception as error:  # the diagnosis must not hide the error that it explains
            recorder.error = error
        return recorder

    def _only_together(self, recorder: FrameRecorder) -> bool:
        """Return whether the bad value may come from what the ranks send each other; the same on every rank."""
        unanswered = isinstance(recorder.error, UnansweredCollectiveError)
        failed = recorder.error is not None and not unanswered
        communicates = recorder.answered > 0 or unanswered
        state = torch.tensor([recorder.found_bad_values, communicates, failed], dtype=torch.int32)
        found, communicates, failed = self.communicator.all_reduce(state, "max").tolist()
        # A rank that failed alone would do so again, and leave the others in a collective.
        return bool(communicates and not found and not failed)

    def _notes(self, recorder: FrameRecorder, record: StepRecord) -> list[str]:
        if recorder.error is not None:
            return [f"Replaying the batch failed: {type(recorder.error).__name__}: {recorder.error}"]
        if recorder.answered:
            return [
                "The step communicates with other ranks. In the replay this rank's own tensors stood for theirs, so"
                " the loss is not compared."
            ]
        if (replayed := _number(recorder.loss)) != (seen := _number(record.loss)):
            return [
                f"The replayed loss was {replayed}, not {seen}: the step is not"
                " deterministic (state kept in training_step, or nondeterministic operations)."
            ]
        return []

    def _known(self, record: StepRecord) -> RankReport:
        """Return a report of what is known without a replay."""
        report = RankReport(self.communicator.rank, self.communicator.host, record.occasion)
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        report.loss = None if record.loss is None else float(record.loss.sum()) / (scale * record.weight)
        if record.made_nan:
            report.gradients = ["not shown: this detector has made all of them nan, to tell the other ranks"]
        else:
            for name, parameter in self.module.named_parameters():
                found = tensor_statistics(parameter.grad)
                if parameter.grad is not None and found is not None and (found.nan or found.inf):
                    counts = f"{found.nan} nan, {found.inf} inf of {parameter.grad.numel()}"
                    report.gradients.append(f"{name}: {counts}")
        report.notes += record.notes
        return report

    def _add_findings(self, report: RankReport, recorder: FrameRecorder, record: StepRecord) -> None:
        if recorder.found_bad_values or not isinstance(recorder.error, UnansweredCollectiveError):
            if recorder.error is not None:  # it may have failed before the loss was there
                recorder.loss = record.loss
            report.clean = not recorder.found_bad_values
        report.frames = list(recorder.frames)
        report.producer, report.propagators = recorder.producer, recorder.propagators
        if report.producer is not None:
            return
        report.backward_producer = recorder.backward_producer
        if report.backward_producer is not None:
            frames = list(recorder.backward_frames.values())
            bad = next(i for i, f in enumerate(frames) if f.module == report.backward_producer.module)
            report.backward_frames = frames[max(0, bad + 1 - self.settings.max_frames_to_save) : bad + 1]

    def _remedy(self, report: RankReport, record: StepRecord, recorder: FrameRecorder) -> Remedy:
        first = report.producer or report.backward_producer
        if first is None:
            return Remedy(text=OUTSIDE) if report.clean is False else Remedy()
        found: Remedy | None = None
        if first.low_precision and first.kind not in ("weight", "batch"):
            if not recorder.alone:  # each rank tries as often as it needs, which must not send anything
                return Remedy((first.module,) if first.module else ())
            try:
                found = search(self.module, first, lambda: self._producer_now(record))
            except Exception as error:  # a module may not accept float32; then there is no such remedy
                report.notes.append(f"The search for a remedy failed: {type(error).__name__}: {error}")
        return found or Remedy(text=advice(first))

    def _producer_now(self, record: StepRecord) -> Producer | None:
        recorder = FrameRecorder(self.module, self.settings)
        replay(self.trainer, self.module, record, recorder, answer_collectives=True)
        if recorder.producer is not None:
            return recorder.producer
        if recorder.backward_producer is not None and self._scaler is None:
            return recorder.backward_producer
        if has_bad_values(recorder.loss):
            return Producer("code", "", type(self.module).__name__)
        return None


def _number(loss: Tensor | None) -> str:
    return "none" if loss is None else f"{float(loss.sum()):.9g}"
