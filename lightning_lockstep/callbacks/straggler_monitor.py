"""StragglerMonitor: which rank the others wait for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.distributed import Communicator, Gather, current_communicator
from lightning_lockstep.distributed.failure.attempt import attempt_on
from lightning_lockstep.distributed.local_collectives import watch_waits
from lightning_lockstep.errors import Preempted
from lightning_lockstep.steps.patching import replaced
from lightning_lockstep.stragglers import (
    NOBODY,
    Hosts,
    OwnStep,
    RankTimes,
    StepTimer,
    StragglerTracker,
    Verdict,
    Window,
    change_line,
    figures,
    report,
)

_log = logging.getLogger(__name__)

# -- Step times on their way to rank 0, and compared as soon as all have come --


class StragglerExchange:
    """Sends this rank's steps to rank 0, which compares them; one object on every rank for each fit."""

    # They are sent in batches of `every_n_steps`, after a later step if a GPU has not measured the last of them yet.

    def __init__(self, communicator: Communicator, *, every_n_steps: int, min_share: float) -> None:
        channel, world_size = communicator.side_channel, communicator.world_size
        # No two fits share a topic.
        self._gather = Gather(channel, attempt_on(channel).topic("straggler"))
        self.close = self._gather.close
        self._host, self._every = communicator.host, every_n_steps
        self._batches: deque[list[OwnStep | None]] = deque([[]])  # not sent yet; the last has room
        self._sent = self._compared = 0  # batches
        # Of rank 0:
        self.tracker = StragglerTracker(world_size, every_n_steps=every_n_steps, min_share=min_share)
        self.hosts: dict[int, str] = {}
        self.missing: tuple[int, ...] = ()  # ranks whose last steps had not come at the end

    def step_done(self, own: OwnStep | None) -> list[Window]:  # None: not measured
        """Note the next step, and send what is complete; return what rank 0 has found since; from the main thread."""
        self._batches[-1].append(own)
        if len(self._batches[-1]) == self._every:
            self._batches.append([])
        while len(self._batches) > 1 and all(one is None or one.is_known for one in self._batches[0]):
            self._send()
        return self._found()

    def finish(self, timeout: float) -> list[Window]:  # of rank 0 [s]; 0 after a failure
        """Send the last steps; rank 0 waits for those of the others, and returns what the steps show that have come."""
        while self._batches:
            self._send()
        if timeout > 0:
            self._gather.timeout = timeout
            self.missing = self._gather.collect("last", None, for_all=False).missing
        return [*self._found(whole=False), *filter(None, [self.tracker.decide_now()])]

    def _send(self) -> None:
        steps = [own.times() if own is not None and own.is_known else None for own in self._batches.popleft()]
        self._gather.post(self._sent, {"host": self._host, "steps": steps}, for_all=False)
        self._sent += 1

    def _found(self, *, whole: bool = True) -> list[Window]:
        """Compare the batches that have come from all ranks, or else from any."""
        found: list[Window] = []
        while of_ranks := self._gather.take(self._compared, whole=whole):
            self.hosts |= {rank: sent["host"] for rank, sent in of_ranks.items()}
            for position in range(self._every):
                steps = {rank: sent["steps"][position : position + 1] for rank, sent in of_ranks.items()}
                if times := {rank: RankTimes(*one) for rank, sent in steps.items() for one in sent if one}:
                    number = self._compared * self._every + position
                    found += filter(None, [self.tracker.add(number, times)])
            self._compared += 1
        return found


# -- The callback --

# How long rank 0 waits at the end of a fit for the last figures of the others [s].
_AT_THE_END = 2.0


class StragglerMonitor(EndsWithRun):
    """Reports which rank the others wait for, since when, by how much, and in which part of its step.

    The rank that waits least in the collectives of its steps is the one that the others wait for. Rank 0 prints a line
    when another rank becomes that one, gives figures to the Trainer's loggers, and prints a table at the end.

    Args:
        every_n_steps: Optimizer steps after which the ranks send their figures to rank 0, which decides.
        min_share: Fraction of the time that the others must lose by waiting for a rank before it is reported (0 to 1).

    Attributes:
        verdict: On rank 0: the rank that the others wait for now; after the fit, over all of it.

    Raises:
        ConfigurationError: One message with every argument that cannot be used.

    Ranks: every rank has one. Every ``every_n_steps`` a message to rank 0 over the side channel; no collective. The
        cost of a step is a few reads of a clock, and two for each wait.
    """

    def __init__(self, *, every_n_steps: int = 50, min_share: float = 0.05) -> None:
        super().__init__()
        faults = Faults()
        faults.whole("every_n_steps", every_n_steps, what="a whole number of steps", such_as=50)
        faults.number("min_share", min_share, what="a share of the time", above=0, below=1, such_as=0.05)
        faults.raise_all()
        self.every_n_steps, self.min_share = every_n_steps, min_share
        self.verdict: Verdict = NOBODY
        self._timer: StepTimer | None = None  # there is one if there is an exchange
        self._exchange: StragglerExchange | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Open the side channel while all ranks are here. Ranks: all, together."""
        if stage == "fit":
            self.at_end.close()
            self.verdict = NOBODY
            if current_communicator().world_size > 1:
                _ = current_communicator().side_channel
            else:
                say("StragglerMonitor measures nothing here: there is one rank.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure. Ranks: all ranks; nothing is sent."""
        communicator = current_communicator()
        if communicator.world_size > 1:
            exchange = StragglerExchange(communicator, every_n_steps=self.every_n_steps, min_share=self.min_share)
            self.at_end.callback(exchange.close)
            timer = StepTimer(trainer.strategy.root_device)
            self.at_end.enter_context(replaced(self, _exchange=exchange, _timer=timer))
            self._global_step = trainer.global_step
            self._watch_actions(trainer, timer)
            self.at_end.callback(watch_waits(timer.wait_begins, timer.wait_ends))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave out the first step of an epoch, in which loaders start, a validation and the step after it."""
        if self._timer is not None:
            self._timer.interrupt()

    on_validation_start = on_train_epoch_start

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Record the beginning of a backward pass."""
        if self._timer is not None:
            self._timer.backward_begins(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the end of a backward pass."""
        if self._timer is not None:
            self._timer.backward_ends()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the step, with all batches that it has accumulated. Ranks: every rank; does not wait."""
        if self._exchange is None or self._timer is None or trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._tell(trainer, self._exchange.hosts, self._exchange.step_done(self._timer.end()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table. Ranks: all; rank 0 waits for the others' last figures, 2 s at most."""
        self._end(trainer, timeout=_AT_THE_END)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Print the table of what is known. Ranks: any; waits only if all ranks leave together."""
        self._end(trainer, timeout=_AT_THE_END if isinstance(exception, Preempted) else 0.0)

    def _watch_actions(self, trainer: Trainer, timer: StepTimer) -> None:
        """Time loading and the other callbacks through the calls to Lightning's profiler."""
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        start, stop = profiler.start, profiler.stop
        own = f"]{self.state_key}."

        def started(action: str) -> None:
            start(action)
            if own not in action:
                timer.enter(action)

        def stopped(action: str) -> None:
            timer.leave(action)
            stop(action)

        self.at_end.enter_context(replaced(profiler, start=started, stop=stopped))

    def _tell(self, trainer: Trainer, hosts: Hosts, windows: Sequence[Window]) -> None:
        for window in windows:  # on rank 0 alone there are any
            self.verdict = window.verdict
            if window.changed:
                _log.warning("%s", change_line(window, hosts))
            for logger in trainer.loggers:
                logger.log_metrics(figures(window), step=trainer.global_step)

    def _end(self, trainer: Trainer, *, timeout: float) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        self._tell(trainer, exchange.hosts, exchange.finish(timeout))
        if trainer.is_global_zero:
            self.verdict = exchange.tracker.conclusion()
            say(report(exchange.tracker, exchange.hosts, exchange.missing))
        self.at_end.close()
