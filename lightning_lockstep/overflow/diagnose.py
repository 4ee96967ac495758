"""Whether a bad value is an alarm, and which module made it: what a replay of its batch shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep.distributed.local_collectives import UnansweredCollectiveError
from lightning_lockstep.numerics.statistics import has_bad_values, tensor_statistics
from lightning_lockstep.overflow.frames import FrameRecorder, Producer
from lightning_lockstep.overflow.replay import OUTSIDE, Remedy, StepRecord, advice, is_divided, replay, search
from lightning_lockstep.overflow.report import RankReport, ReportPublisher
from lightning_lockstep.steps.capabilities import StepGradients, missing_capabilities


class BadStepDiagnosis:
    """Diagnoses a step with a bad value that all ranks know of; each method is called on all of them."""

    def __init__(
        self, trainer: Trainer, module: LightningModule, publisher: ReportPublisher, gradients: StepGradients
    ) -> None:
        self.trainer, self.module, self.publisher, self.gradients = trainer, module, publisher, gradients
        self.settings, self.communicator = publisher.settings, publisher.communicator

    def why_alarm(self, record: StepRecord) -> str | None:
        """Return why this is an alarm, the same on every rank; ``None`` for an ordinary skip of a loss scaler."""
        if (scaling := self.gradients.loss_scale()) is None:
            return self._describe_and_mark(record)
        scale, floor = scaling
        bad = any(map(has_bad_values, (record.loss, record.activation_flag)))
        entries = self.publisher.collect({"forward": bad, "scale": scale}).entries.values()
        if any(entry["forward"] for entry in entries):
            return "the forward is not finite, which no loss scale can fix"
        lowest = min(entry["scale"] for entry in entries)
        if lowest <= max(floor, self.settings.scale_floor):
            return f"gradients are not finite although the loss scale is down to {lowest:g}"
        too_many = self.gradients.why_skips_are_too_many()
        return None if too_many is None else too_many.rstrip(".")

    def _describe_and_mark(self, record: StepRecord) -> str:
        """Return what was seen, the same on every rank; mark gradients that this detector itself has made nan."""
        usual = "the loss or the gradients are not finite"
        if self.settings.mode != "hooks":
            return usual
        is_bad = has_bad_values(record.loss, allow_inf=self.settings.allowed.match("loss"))
        flags = {"activation": has_bad_values(record.activation_flag), "loss": is_bad}
        entries = self.publisher.collect(flags).entries.values()
        if not any(entry["activation"] for entry in entries) or any(entry["loss"] for entry in entries):
            return usual
        several = self.communicator.world_size > 1
        if several and not self.gradients.divided and self.settings.action != "warn":
            record.made_nan = True
        return "an output of a module is not finite, although the loss is"

    @property
    def _scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def report(self, record: StepRecord) -> RankReport:
        """Return what this rank knows of the step, and what a replay of it shows."""
        # Collectives of the step are answered on this rank. If that shows no bad value on any rank, all replay it
        # once more with real collectives. If the parameters are divided among the ranks, all replay it together
        # from the beginning.
        strategy, report = self.trainer.strategy, self._report_without_replay(record)
        missing = missing_capabilities(strategy, "step_alone")
        if missing and not hasattr(strategy, "engine_gradients"):
            report.notes.append(f"Not replayed: on {type(strategy).__name__}, {missing[0]}.")
            return report
        together = is_divided(self.trainer)
        recorder = self._replay_together(record) if together else self._replay(record, alone=True)
        if recorder.alone and self._only_together(recorder):
            recorder = self._replay(record, alone=False)
        report.notes += self._notes(recorder, record)
        self._add_findings(report, recorder, record)
        report.remedy = self._remedy(report, record, recorder)
        return report

    def _replay_together(self, record: StepRecord) -> FrameRecorder:
        """Replay with parameters gathered from all ranks."""
        # The others wait for the part of a rank that fails, unless they fail at the same place or have finished.
        recorder = self._replay(record, alone=False)
        if self.publisher.all_arrive():
            return recorder
        text = "All ranks replayed a batch whose loss or gradients are not finite, and the replay did not end on all."
        if recorder.error is None:
            raise RuntimeError(text)
        if hasattr(recorder.error, "add_note"):  # from Python 3.11 on
            recorder.error.add_note(text)
        raise recorder.error

    def _replay(self, record: StepRecord, *, alone: bool) -> FrameRecorder:
        recorder = FrameRecorder(self.module, self.settings, divided=is_divided(self.trainer))
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

    def _report_without_replay(self, record: StepRecord) -> RankReport:
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
        if recorder.error is not None and not isinstance(recorder.error, UnansweredCollectiveError):
            recorder.loss = record.loss  # it failed before it had a loss, so the one of the step is judged
        if recorder.error is None or recorder.found_bad_values:
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
