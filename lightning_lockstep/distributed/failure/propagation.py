"""What a rank does once a rank has failed: what ends its waits, which error it raises, and how its process ends.

The ranks agree on the first failure (:mod:`~.attempt`). From then on each of them has this time:

    failure is known          1 s later; at once        nearly the end of the             6 s later
                              for one of the guard      grace period
    |-------------------------|-------------------------|---------------------------------|
    raises at the boundary    an interrupt raises in    ended by force, unless it has     ended by force,
    of a step                 what it waits in, and     raised its own error or is        though its error
                              ends its connections      over with the attempt             was printed

=========================================== =========================================================================
what has ended the work of this rank        what it raises
=========================================== =========================================================================
the exit code on which all ranks agreed     that exit: it is no failure
Ctrl-C                                      ``KeyboardInterrupt``, without waiting for others
a collective that broke                     the error of the failure that broke it, once that is known
anything else after the guard's diagnosis   the guard's error
the first failure                           its own error, which rank 0 prints
an error of the same type as the first one  its own error
anything else after another rank failed     :class:`RankFailedError` with the report of that rank
``sys.exit()`` after another rank failed    its own, with its exit code
=========================================== =========================================================================
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep._system import on_ctrl_c, shell_exit_code
from lightning_lockstep.distributed.failure.attempt import ARRIVES_WITHIN, attempt_on, is_running
from lightning_lockstep.distributed.failure.interrupt import (
    Interrupt,
    Process,
    abort_devices,
    connections_with,
    end_connections,
    keep_from_forks,
)
from lightning_lockstep.distributed.failure.process_exit import (
    ExitReport,
    clock,
    end_now,
    exit_plan,
    interrupt_clock,
    set_exit_report,
)
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    forget_failure,
    is_broken_collective,
    is_orderly_exit,
    is_same_error,
    keep_failure,
    note_failure,
)
from lightning_lockstep.distributed.side_channel.channel import BACK_WITHIN, SideChannel
from lightning_lockstep.errors import CollectiveError, LockstepError, RankFailedError

# Ranks that raise the same error may do so this much later than the first [s]; then their waits are ended.
_MAY_RAISE_THE_SAME = 1.0
# At the end of the grace period a rank kills the ranks that it has started; it may take this much longer to exit [s].
_CHILDREN_END = 6.0
# How often a rank looks whether those of its host have ended [s].
_LOOK_EVERY = 0.02


class FailurePropagation:
    """Stops this rank when another one fails, and the others when this one does. Ranks: one object on every rank."""

    def __init__(self, channel: SideChannel) -> None:
        self.channel, self.attempt = channel, attempt_on(channel)
        self.check_told_to_end: Callable[[], None] = lambda: None  # raises if this rank has got SIGTERM
        self.guard: Any = None  # of this channel, if it is on: finds out why a collective broke here
        self.store_port = 0  # of the store at which the ranks have met
        # The failure because of which this process is ended by force when the grace period is over.
        self._ends_by_force: FailureRecord | None = None
        self._interrupt = Interrupt(self._pending)
        self.attempt.on_failure = self._on_failure
        channel.ends_wait = self.ends_wait
        channel.at_close(self._interrupt.remove)

    # -- an attempt --

    def enter(self) -> None:
        """Enter the next attempt; the program has caught what this rank has raised before. Ranks: any, alone."""
        clock.start()
        interrupt_clock.start()
        self._interrupt.install()
        with self.channel.news:
            if self.attempt.has_failure:
                exit_plan.cancel_forced_exit()
                forget_failure()
            self._ends_by_force = None
            self.attempt.enter()

    def have_met(self, processes: Sequence[Process], store_port: int) -> None:
        """Note where the ranks are that have met; processes that this one forks have no connections with them."""
        self.channel.processes.update(enumerate(processes))
        self.store_port = store_port
        keep_from_forks(connections_with(processes))

    def check(self) -> None:
        """Raise here what ends this attempt, if another rank has failed. Ranks: any, alone."""
        record, has_to_raise = self.attempt.record, self.attempt.state == "failed"
        if record is not None and (has_to_raise or record.rank != self.channel.rank):
            raise self._error_because_of(record)

    def ends_wait(self) -> bool:
        """Raise if a failure ends this wait for other ranks; return whether this rank has raised it already."""
        attempt = self.attempt
        if attempt.state in ("running", "over") and self.channel.has_closed(0):
            attempt.decide_left(0)
        record, ended = attempt.record, attempt.ended_process
        if attempt.state == "over" and ended is not None:
            raise RankFailedError(ended.report(), ended)
        if attempt.state == "running":
            self.check_told_to_end()
        elif attempt.state == "failed" and record is not None and not self._may_raise_the_same(record):
            self.check()
        return attempt.state == "raised" and record is not None

    def _may_raise_the_same(self, record: FailureRecord) -> bool:
        """Return whether this rank may be about to raise what the first one has raised a moment before."""
        is_new = time.monotonic() - self.attempt.failed_at < _MAY_RAISE_THE_SAME
        return is_new and record.kind == "exception" and self.channel.usable

    # -- what a failure brings about, on any thread --

    def _on_failure(self, record: FailureRecord) -> None:
        """Plan when a failure ends the waits of this rank, and its process; print it if the attempt is over here."""
        if self.attempt.state == "over":
            if self.attempt.prints_report and record.rank != self.channel.rank and record.kind != "interrupt":
                interrupt_clock.after(0.0, lambda: exit_plan.say_last(self._leave_notes(record).printed()))
        elif self.attempt.is_outlived:
            # Membership ends what this rank waits for, but not what the program does by itself.
            clock.after(self.attempt.grace_period, self._interrupt.raise_soon)
        else:
            self._ends_by_force = record
            at_once = record.kind == "collective"
            interrupt_clock.after(0.0 if at_once else _MAY_RAISE_THE_SAME, self._end_waits, record)
            clock.after(self.attempt.grace_period * 0.9, self._grace_ends, record)

    def _pending(self) -> BaseException | None:
        """Return what this rank still has to raise because of a failure."""
        record = self.attempt.record
        return None if record is None or self.attempt.state != "failed" else record.error()

    def _end_waits(self, record: FailureRecord) -> None:
        """Have the thread that trains raise, and end what it waits in."""
        if self.attempt.record is not record or self._pending() is None:
            return
        self.channel.flush(0.5)  # before this rank ends the connections by which others would notice
        self._interrupt.raise_soon()
        self.end_connections()
        abort_devices()

    def end_connections(self) -> None:
        """Shut down this rank's connections with the others but those of channel and store: they may wait for it."""
        ranks = self.channel.processes.values()
        end_connections(connections_with(ranks, {self.channel.port, self.store_port} - {0}))

    def _grace_ends(self, record: FailureRecord) -> None:
        """End this process by force, unless it deals with the failure."""
        has_to_end = self._ends_by_force is record and not exit_plan.failure_returned
        if has_to_end and self.attempt.state != "over" and not self.attempt.is_outlived:
            self.end_now(record)

    def end_now(self, record: FailureRecord) -> NoReturn:
        """End this process by force because of a failure, from any thread; prints the report if this rank is to."""

        def report() -> str:  # a file system that hangs holds it up only for a while
            kept = self._leave_notes(record)
            return kept.printed() if self.attempt.prints_report and exit_plan.note is None else ""

        end_now(record.exit_code, report)

    # -- the error that this rank raises --

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return the error that this rank is to raise in place of one that ended its work."""
        expected = exit_plan.expected_exit_code
        if isinstance(error, SystemExit) and expected and error.code == expected:
            return error  # the exit code on which all ranks agreed
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted(error)
        attempt = self.attempt
        if not attempt.has_failure:
            self._look_for_cause(error)  # a collective that broke
        first = attempt.record
        if isinstance(error, RankFailedError):  # raised here because another rank has failed
            if first is not None and attempt.state == "failed":
                return self._error_because_of(first)
            attempt.set_raised(first or attempt.describe(error))
            return error
        is_own = isinstance(error, (LockstepError, SystemExit))
        if first and first.kind == "collective" and (not is_own or isinstance(error, CollectiveError)):
            return self._error_because_of(first, error)  # the guard's diagnosis
        first = attempt.fail(error)
        if first.rank == self.channel.rank or is_same_error(error, first):
            return self._own_error(error, first)  # the first failure, or one of the same type
        if not isinstance(error, SystemExit) or isinstance(error, SIGTERMException):
            return self._error_because_of(first)  # anything else after another rank failed
        if not is_orderly_exit(error):
            self._leave_notes(first)
        return error  # ranks that leave by sys.exit() on purpose, all of them, keep their own exit codes

    def _look_for_cause(self, error: BaseException) -> None:
        """If an error looks like a consequence of another rank's failure, look or wait for that."""
        if isinstance(error, SIGTERMException):  # torchrun sends it to all others when a rank has ended
            self.attempt.report_ended_here()
        is_broken = is_broken_collective(error) and not isinstance(error, LockstepError)
        is_told = isinstance(error, RankFailedError) and error.record is None  # as by in_rank_order
        if is_broken and self.guard is not None:
            self.guard.explain(error)
        if is_broken or is_told:
            # A rank that was killed counts as lost only after the time in which it could connect again.
            seconds = max(self.attempt.grace_period / 3, BACK_WITHIN + ARRIVES_WITHIN)
            self.channel.wait_for(lambda: self.attempt.has_failure, seconds, stops=False)

    def _interrupted(self, error: BaseException) -> BaseException:
        """Ctrl-C reaches every rank of a terminal by itself: report it once, wait for nobody."""
        # A second one would end this report before the other ranks have it; later Lightning ignores it too.
        with on_ctrl_c(signal.SIG_IGN):
            first = self._leave_notes(self.attempt.fail(error))
        self._ends_by_force = None if first.kind == "interrupt" else self.attempt.record
        exit_plan.force_exit_at_shutdown(shell_exit_code(-signal.SIGINT))
        return error

    def _error_because_of(self, first: FailureRecord, error: BaseException | None = None) -> BaseException:
        """Return what this rank raises because of a failure; a diagnosis leaves ``error`` in place if it is one."""
        if self.attempt.is_outlived:
            return RankFailedError(first.report(), first)
        if first.kind == "interrupt":
            return self._interrupted(first.error())
        self.attempt.set_raised(first)
        if first.kind == "collective":
            return self._own_error(error if isinstance(error, CollectiveError) else first.error(), first)
        first = self._leave_notes(first)
        exit_plan.force_exit_at_shutdown(first.exit_code)
        if self.attempt.prints_report and self.attempt.decided_alone:
            self._outlast_others()
        stopped = first.error()
        text = first.printed() if self.attempt.prints_report else ""
        set_exit_report(stopped, ExitReport(text, first.exit_code, self._time_to_exit, replaces=True))
        return stopped

    def _own_error(self, error: BaseException, first: FailureRecord) -> BaseException:
        """Return this rank's own error; rank 0 prints it, or this rank if rank 0 does not answer."""
        if is_orderly_exit(error):
            return error  # by sys.exit(0): it is a failure for those that do not leave
        # An error of this package is one of all ranks: each keeps its own, and all end in good order.
        is_first, is_ours = first.rank == self.channel.rank, isinstance(error, LockstepError)
        # A rank that multiprocessing has started has no excepthook to end it in time: the grace period does.
        if is_first or is_ours or exit_plan.note is None:
            self._ends_by_force = None
        first = self._leave_notes(first)
        report = self._report_of_own(error, first)
        set_exit_report(error, report)
        if first.kind == "collective":
            # Destructors wait for peers, and to free the compiler that has read call sites takes seconds.
            exit_plan.force_exit_at_shutdown(first.exit_code, unless_caught=True)
        elif is_ours:
            self.attempt.record = None  # they may still meet, for example to save a checkpoint
        else:
            report.deadline, report.exit_code = self._time_to_exit, first.exit_code
            if is_first:
                self._exit_first(error, first)
        return error

    def _report_of_own(self, error: BaseException, first: FailureRecord) -> ExitReport:
        headline, saved, is_first = first.headline(), first.saved_to(), first.rank == self.channel.rank
        if not self.attempt.prints_report and not self.attempt.decided_alone:
            return ExitReport(replaces=True)
        if not is_first and self.attempt.describe(error).summary != first.summary:
            return ExitReport(first.printed(), headline=f"lightning-lockstep: {headline}")
        text = f"{headline}\n{saved}".rstrip() if is_first and not isinstance(error, LockstepError) else saved
        return ExitReport(text, headline=headline)

    def _exit_first(self, error: BaseException, first: FailureRecord) -> None:
        """Settle how the program of the rank that failed first exits, if it does not catch the error."""
        # Python prints nothing for a SystemExit, and nobody can see later whether the program has caught it.
        exits = isinstance(error, SystemExit)
        report = first.printed() if exits and self.attempt.prints_report and exit_plan.note is None else ""
        exit_plan.force_exit_at_shutdown(first.exit_code, report, unless_caught=not exits)
        if threading.current_thread() is not threading.main_thread() and hasattr(error, "add_note"):
            # Not in Python 3.10. Whoever runs this thread prints the error: Ray Train, on the driver.
            error.add_note(f"\n{first.headline()}\n{first.saved_to()}".rstrip())

    @property
    def _time_to_exit(self) -> float:
        return self.attempt.grace_period + _CHILDREN_END

    def _leave_notes(self, record: FailureRecord) -> FailureRecord:
        """Leave the notes of a failure, and on the rank that prints it the file that the record names."""
        prints = self.attempt.prints_report or record.rank == self.channel.rank
        if prints and (self.channel.rank == 0 or self.attempt.decided_alone):
            record = keep_failure(record)
        note_failure(record)
        return record

    def _outlast_others(self) -> None:
        """Wait for the end of the others of this host: without rank 0 each prints its last lines, above the report."""
        self.end_connections()  # they may wait for this rank
        # Not for that of rank 1, which also reports the end of rank 0, and waits for this rank.
        others = [pid for rank, pid in self.attempt.others_here().items() if rank > 1]
        deadline = time.monotonic() + self.attempt.grace_period / 2
        while time.monotonic() < deadline and any(map(is_running, others)):
            time.sleep(_LOOK_EVERY)


def propagation_on(channel: SideChannel) -> FailurePropagation:
    """Return the failure propagation of a side channel; the same one for as long as the channel lives."""
    return channel.get_or_create(FailurePropagation)
