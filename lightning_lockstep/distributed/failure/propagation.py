"""What happens to the other ranks when one rank fails: one state machine, the same on every rank.

Rank 0 decides which failure of a fit was the first. A rank that fails reports to it. The first report of a fit wins,
and rank 0 sends its record to all, which at once confirms that rank 0 prints it. A rank that gets no answer within a
third of the grace period stands on its own. The others stop where they are: at the next boundary of a training step,
or when the collective they sit in breaks, or, at the end of the grace period, by force. Nobody enters a barrier or
destroys a process group on the way out: both can wait for a dead peer.

=================== ============================ ====================================================================
message             from, to                     body
=================== ============================ ====================================================================
``failure/report``  any rank, rank 0             fit, record, whether all ranks should raise it
``failure/first``   rank 0, all                  the same: the first failure of that fit
``failure/caught``  the rank that failed, rank   fit: the program has caught its failure and begins another
                    0; from there all
=================== ============================ ====================================================================

=================== =========================================== ======================================================
state of a rank     what it means                               what ends it
=================== =========================================== ======================================================
running             nothing has failed in this fit              ``first`` (failed; in doubt where all ranks should
                                                                raise it), an own error (raised)
in doubt            another rank has raised an error that all   an own error (raised), half the grace period or the
                    ranks should raise                          end of a process (failed), ``caught`` (over)
failed              `check` raises, the countdown runs          an own error (raised), ``caught`` (over), the end of
                                                                the grace period (ended by force)
raised              this rank has raised, its own error or a    `begin_fit` (running, in the next fit)
                    `RankFailedError`
over                the rank that had failed goes on, and this  an own error of that type (raised; no failure),
                    one may yet raise the same                  another one (a failure of the next fit), `begin_fit`
=================== =========================================== ======================================================

Fits are numbered: a rank that begins one adds one, and after a failure all go on with the number that follows the one
which rank 0 has named, however many each had begun. So no message has to be waited for when a fit begins, and one
about a fit that is over for its receiver (late), or that its receiver will begin after one that has failed (early), is
known by its number. Only the latest record of rank 0 is kept. A process that has ended begins no other fit: a record of
that stops every fit from then on.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lightning_lockstep.distributed.failure.exit_notes import (
    forget_failure,
    keep_failure,
    note_failure,
    note_for_parent,
    note_for_torchrun,
)
from lightning_lockstep.distributed.failure.process_exit import (
    end_now,
    keep_quiet,
    outcome,
    outcome_of,
    print_instead,
)
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    is_alike,
    is_broken_collective,
    own_place,
)
from lightning_lockstep.distributed.side_channel.channel import BACK_WITHIN, Message, SideChannel
from lightning_lockstep.errors import LockstepError, RankFailedError

_REPORT, _FIRST, _CAUGHT = "failure/report", "failure/first", "failure/caught"
# How much longer than the grace period, in which it waits for the ranks it has started, a rank may take to exit [s].
_CHILDREN_END = 2.0
# How long a message may take that is on its way already [s].
_ON_ITS_WAY = 1.0
_VANISHED = (
    "its connection has ended without a report: its process was killed, or was stopped for longer than silence_limit,"
    " or its host cannot be reached"
)
# How long a report that is being written holds a forced end [s].
_REPORT_LIMIT = 60.0


class Failure(NamedTuple):
    """The first failure of a fit, as far as is known, or one that may be it."""

    fit: int
    record: FailureRecord
    of_all: bool = False  # whether all ranks should raise it: only if one does not, it is a failure

    def body(self) -> list[Any]:
        return [self.fit, self.record.to_json(), self.of_all]

    @classmethod
    def from_body(cls, body: Any) -> Failure:
        fit, record, of_all = body
        return cls(int(fit), FailureRecord.from_json(record), bool(of_all))


class FailurePropagation:
    """Informs every rank when one fails, and stops this one when it is another. Ranks: one object on every rank."""

    def __init__(self, channel: SideChannel) -> None:
        self.channel = channel
        self.grace_period = 10.0  # from the message of a failure to an end by force [s]
        # Returns the folder for reports of this run, or None, where none is written; never raises.
        self.folder: Callable[[], Path | None] = lambda: None
        # Whether this rank, or the process that started it and is no rank, prints the report of another's failure.
        self.prints_report, self.parent_prints = channel.rank == 0, False
        self.on_force: Callable[[], None] | None = None  # to end this rank's child ranks first
        # Returns the error that all ranks raise in place of one that was raised here, if any.
        self.explain: Callable[[BaseException], BaseException | None] | None = None
        self.record: FailureRecord | None = None  # of the rank that failed first
        self._fit = 0
        self._over = -1  # failures of fits up to this one are over here
        self._raised_in: int | None = None  # the failed fit for which this rank has raised
        self._told: Failure | None = None  # the latest that rank 0 has decided on
        self._dead: FailureRecord | None = None  # of the first process that has ended
        self._rank_missing = False  # a rank is lost and that was reported
        self._alone = False  # rank 0 does not answer
        self._keeps: type[BaseException] | None = None  # of an own error, by which this rank ends in time
        self._news = threading.Condition()
        channel.watch_peers(self._lost)
        channel.on(_FIRST, self._take_first)
        channel.on(_CAUGHT, self._take_caught)
        if channel.rank == 0:
            channel.on(_REPORT, lambda message: self._decide(Failure.from_body(message.body)))

    @property
    def failed(self) -> bool:
        """Whether any rank is known to have failed; costs two attribute reads."""
        return self.record is not None

    def has_raised(self, rank: int) -> bool:
        """Return whether an error of this package is known that another rank may raise, or have raised, too."""
        told = self._told
        return rank != self.channel.rank and told is not None and told.of_all and told.fit > self._over

    def begin_fit(self) -> None:
        """Begin a fit: what this rank raised before was caught. Raises a failure of another rank not yet noticed."""
        # A rank that goes on after its failure lets the others know, so that they forget it, too; nothing else is sent.
        with self._news:
            caught, told = self._raised_in, self._told
            if caught is not None or self.record is None:
                if caught is not None:
                    self._over = max(self._over, caught)
                is_next = caught is not None or self._over >= self._fit
                self._fit = 1 + (self._over if is_next else self._fit)
                self._raised_in = self.record = self._keeps = None
                self._alone = False
                self._apply()
                if self._dead is not None and self.record is None:
                    self._decide(Failure(self._fit, self._dead))
        if caught is not None:
            outcome.cancel_forced_exit()
            forget_failure()
            if told is not None and (told.fit, told.record.rank) == (caught, self.channel.rank):
                self.channel.post(_CAUGHT, caught, to=None if self.channel.rank == 0 else 0)
                self.channel.flush(2.0)  # before this rank meets the others in a collective
        self.check()

    def check(self) -> None:
        """Raise :class:`RankFailedError` here if another rank has failed. Ranks: any, alone."""
        record = self.record
        if record is not None and record.rank != self.channel.rank:
            raise self._stopped(record)

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return the error that this rank is to raise in place of one that ended its work."""
        # The first rank to fail informs the others and keeps its error, and so does a rank that raises an error of the
        # same type. A rank whose collective broke because of a failure gets a `RankFailedError` with the first one's
        # report: where an error looks like such a consequence, it waits up to a third of the grace period for the
        # message, and as long for rank 0.
        if isinstance(error, SystemExit) and error.code == (outcome.expected_exit_code or object()):
            return error
        if isinstance(error, RankFailedError):
            self._raises()
            return error
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted(error)
        if self.explain is not None and not isinstance(error, SystemExit):
            error = self.explain(error) or error
        if not isinstance(error, LockstepError) and is_broken_collective(error):
            self._wait_for_cause()
        first = self._first_failure(error)
        if isinstance(error, LockstepError):
            return self._raised_on_all(error, first)
        if first is None:
            return self._ends(error, 1)
        if first.rank == self.channel.rank:
            return self._raised_first(error, first)
        if is_alike(error, first):
            return self._raised_alike(error, first)
        if not isinstance(error, SystemExit):
            return self._stopped(first)
        self._keep(first)
        return error  # ranks that leave by sys.exit() on purpose, all of them, keep their own exit codes

    def report_child_exit(self, rank: int, returncode: int, pid: int) -> None:
        """Inform all ranks that a rank started by this one has ended, with its ``Popen`` return code."""
        kind, summary, code = describe_exit(returncode)
        host = socket.gethostname()
        record = FailureRecord(rank, self.channel.world_size, host, pid, kind, summary, exit_code=code)
        self._report(Failure(self._fit, record))

    # -- which failure is the first ---------------------------------------------------------------------

    def _first_failure(self, error: BaseException) -> FailureRecord | None:
        """Return the record of the first failure in the fit in which this rank raises ``error``, perhaps its own."""
        # None: that fit is over, the rank that had failed goes on, and this one has raised the same.
        record = self.describe(error)
        with self._news:
            told = self._told
            if told is not None and not self._applies(told):
                is_early, is_over = told.fit > self._over, self._over >= self._fit
                if is_early or (is_over and is_alike(error, told.record)):
                    self._raises()
                    return None
                if is_over:
                    self._fit = self._over + 1
                told = None
            self._raises()
            fit = self._fit
        if told is None:
            self._report(Failure(fit, record, isinstance(error, LockstepError)))
        with self._news:
            told = self._told
            assert told is not None
            self._fit, self._raised_in = max(self._fit, told.fit), told.fit
            if self.record is None and not isinstance(error, LockstepError):
                self._stop_for(told)
            return told.record

    def _raises(self) -> None:
        """Note that this rank raises: its own error or a RankFailedError."""
        with self._news:
            if self._raised_in is None:
                told = self._told
                self._raised_in = told.fit if told is not None and self._applies(told) else self._fit

    def _report(self, failure: Failure) -> None:
        """Have rank 0 decide about a failure, and wait for its answer; without one this rank stands on its own."""
        if self.channel.rank == 0:
            self._decide(failure)
            self.channel.flush(1.0)
            return
        self.channel.post(_REPORT, failure.body(), to=0)
        waits = failure.record.kind != "interrupt"
        if not waits:
            self.channel.flush(1.0)

        def is_answered() -> bool:
            return self._told is not None and self._told.fit >= failure.fit

        with self._news:
            if not (waits and self.channel.wait_for(self._news, is_answered, self.grace_period / 3)):
                self._decide(failure)

    def _decide(self, failure: Failure) -> None:
        """Settle on the first failure of a fit: on rank 0 for all ranks, on one that it does not answer for itself."""
        record = failure.record.in_folder(self.folder())
        if record.ended and not record.where:  # it cannot say where it was; the other ranks are near
            record = replace(record, where=own_place())
        failure = failure._replace(record=record)
        with self._news:
            told = self._told
            if failure.record.ended:
                self._dead = self._dead or failure.record
                if self.record is not None or self._raised_in is not None:
                    return  # it may be a consequence; if the program goes on, `begin_fit` comes back to it
                if told is not None and told.fit > self._over:  # what a rank has said explains more
                    failure = told._replace(of_all=False)
                    self._fit = max(self._fit, told.fit)
                else:
                    failure = failure._replace(fit=max(self._fit, self._over + 1))
            elif told is not None and failure.fit <= told.fit:
                return  # its sender has been told which was the first
            if self.channel.rank == 0:
                self.channel.post(_FIRST, failure.body())
            else:
                self._alone = True
            self._take(failure)

    def _take_first(self, message: Message) -> None:
        failure = Failure.from_body(message.body)
        with self._news:
            if self._told is None or failure.fit >= self._told.fit:
                self._take(failure)

    def _take(self, failure: Failure) -> None:
        self._told = failure
        self._apply()
        self._news.notify_all()

    def _applies(self, failure: Failure) -> bool:
        """Return whether a failure is of this rank's fit, or of one before or after it that this rank takes part in."""
        if failure.record.ended:
            return True
        is_own_over = self._raised_in is not None or self._over >= self._fit
        return failure.fit > self._over and not (failure.fit > self._fit and is_own_over)

    def _apply(self) -> None:
        """Let the latest record of rank 0 stop this rank, in time."""
        told = self._told
        if told is None or not self._applies(told):
            return
        if not told.of_all:
            self._stop_for(told)
        elif self._raised_in is None:
            self._later(self.grace_period / 2, self._doubt_ends, told)

    def _stop_for(self, failure: Failure) -> None:
        """Take a failure for the one that stops this rank, and start the countdown if it is another rank's."""
        self.record = failure.record
        if failure.record.rank != self.channel.rank:
            self._later(self.grace_period * 0.9, self._grace_ends, failure.record)

    def _take_caught(self, message: Message) -> None:
        """The rank that failed has caught it and goes on."""
        fit = int(message.body)
        with self._news:
            told = self._told
            if self.channel.rank == 0:
                if told is None or (told.fit, told.record.rank) != (fit, message.sender):
                    return
                self.channel.post(_CAUGHT, fit)
            self._over = max(self._over, fit)
            if self._raised_in is None and told is not None and not self._applies(told):
                self.record = None

    def _wait_for_cause(self) -> None:
        """Wait for the message of the failure that broke a collective here."""
        with self._news:
            # A rank that was killed is known to be lost only when it has not come back.
            self._wait_for_record(max(self.grace_period / 3, BACK_WITHIN + _ON_ITS_WAY))
            told = self._told
            if self.record is None and told is not None and told.fit > self._over:
                # An error that all should raise, or the failure of a fit that this rank has not begun.
                self._fit = max(self._fit, told.fit)
                self._stop_for(told)

    def _wait_for_record(self, seconds: float) -> None:
        self.channel.wait_for(self._news, lambda: self.record is not None, seconds, needs_main=False)

    # -- processes that have ended -----------------------------------------------------------------------

    def _lost(self, rank: int) -> None:
        host, pid = self.channel.process_of(rank)
        record = FailureRecord(rank, self.channel.world_size, host, pid, "vanished", _VANISHED)
        failure = Failure(self._fit, record)
        if rank != 0:
            # Not on this thread, which must not wait. The first one counts, of a thousand perhaps.
            if not self._rank_missing:
                self._later(0.0, self._report, failure)
                self._rank_missing = True
            return
        with self._news:
            # Every rank notices by itself and decides alone; with rank 0 the one that prints is gone.
            told = self._told
            has_printed = told is not None and told.fit > self._over and told.record.rank == 0
            if self.record is None and not has_printed:
                speaks = self.channel.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
                self.prints_report = self.prints_report or speaks
            self._decide(failure)

    # -- the error that this rank raises ----------------------------------------------------------------

    def _raised_first(self, error: BaseException, record: FailureRecord) -> BaseException:
        """Raise the own error; rank 0 prints it, or this rank does where rank 0 has not answered."""
        record = self._keep(record)
        if self.prints_report or not self._alone:
            # Python itself prints nothing of a SystemExit.
            says = isinstance(error, SystemExit) and self.prints_report and not self.parent_prints
            report = record.printed() if says else ""
            # Of a SystemExit nobody can see later whether the program has caught it.
            outcome.force_exit_at_shutdown(
                record.exit_code, report, unless_caught=not isinstance(error, SystemExit)
            )
        self._leave_printing(error, record)
        if threading.current_thread() is threading.main_thread():
            outcome_of(error).headline, outcome_of(error).saved = record.headline(), record.saved_to()
        elif add_note := getattr(error, "add_note", None):  # not in Python 3.10
            # Whoever runs this thread prints the error: Ray Train, on the driver.
            add_note(f"\n{record.headline()}\n{record.saved_to()}".rstrip())
        return self._ends(error, record.exit_code)

    def _raised_alike(self, error: BaseException, record: FailureRecord) -> BaseException:
        """Keep an own error, which ends this process in time unless the program catches it."""
        self._keeps = type(error)
        record = self._keep(record)
        if self.prints_report and self.describe(error).summary != record.summary:
            outcome_of(error).after = record.printed()
        else:
            outcome_of(error).saved = record.saved_to()
            self._leave_printing(error, record)
        return self._ends(error, record.exit_code)

    def _leave_printing(self, error: BaseException, record: FailureRecord) -> None:
        """Leave it to rank 0, where that has answered, or to torchrun to print an error that is in the record."""
        if not self.prints_report and not self._alone:
            keep_quiet(error)
        elif self.prints_report and record.shown_by_torchrun:
            print_instead(error, record.printed())

    def _ends(self, error: BaseException, exit_code: int) -> BaseException:
        """Let an own error, if nobody catches it, end this process within the time that its children get."""
        outcome.end_within(error, self.grace_period + _CHILDREN_END, exit_code, on_force=self.on_force)
        return error

    def _raised_on_all(self, error: BaseException, first: FailureRecord | None) -> BaseException:
        """Errors of this package are raised on every rank: each keeps its own, rank 0 prints it."""
        record = self._kept(replace(self.describe(error), file=first.file) if first else self.describe(error))
        note_for_parent(record)
        note_for_torchrun("\n".join(filter(None, [record.headline(), record.saved_to()])), of=error)
        outcome_of(error).reminder, outcome_of(error).saved = record.headline(), record.saved_to()
        if first is not None and not self.prints_report and not self._alone:
            keep_quiet(error)
        return error

    def _interrupted(self, error: BaseException) -> BaseException:
        """Ctrl-C reaches every rank of a terminal by itself: report it once, wait for nobody."""
        self._keeps = type(error)
        first = self._first_failure(error)
        if first is not None:
            self._keep(first)
        outcome.force_exit_at_shutdown(130)
        return error

    def _stopped(self, record: FailureRecord) -> BaseException:
        if record.kind == "interrupt":
            return self._interrupted(KeyboardInterrupt())
        self._raises()
        record = self._keep(record)
        error = RankFailedError(record.report(), record)
        outcome.force_exit_at_shutdown(record.exit_code)
        if self.prints_report:
            print_instead(error, record.printed())
        else:
            keep_quiet(error)
        return error

    def describe(self, error: BaseException) -> FailureRecord:
        """Return the record of an error that was raised here, with the file in which it is kept."""
        record = describe_error(error, self.channel.rank, self.channel.world_size)
        return record.in_folder(self.folder())

    def _keep(self, record: FailureRecord) -> FailureRecord:
        """Leave the notes of a failure, and on the rank that prints it the file that the record names."""
        record = self._kept(record)
        note_failure(record)
        return record

    def _kept(self, record: FailureRecord) -> FailureRecord:
        prints = self.prints_report or record.rank == self.channel.rank
        return keep_failure(record) if prints and (self.channel.rank == 0 or self._alone) else record

    # -- after a while, each on a separate thread --------------------------------------------------------

    def _later(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        timer = threading.Timer(seconds, function, args)
        timer.name, timer.daemon = "lockstep-failure", True
        timer.start()

    def _doubt_ends(self, failure: Failure) -> None:
        """An error that all ranks should raise: this one has had its time to do so."""
        outcome.wait_for_reports(_REPORT_LIMIT)
        with self._news:
            if self._told is failure and self._raised_in is None and self._applies(failure):
                self._stop_for(failure)
                self._news.notify_all()

    def _grace_ends(self, record: FailureRecord) -> None:
        """End this process by force, unless it deals with the failure."""
        outcome.wait_for_reports(_REPORT_LIMIT)
        if self.record is not record or outcome.failure_returned:
            return  # the program has caught it and goes on
        if self._keeps is KeyboardInterrupt:
            if record.kind == "interrupt":
                return  # Ctrl-C came here too, and the program has handled it
        elif self._keeps is not None and not self.parent_prints:
            return  # this rank has its own error, and ends by it unless the program has caught it
        self.end_now(record)

    def end_now(self, record: FailureRecord) -> NoReturn:
        """End this process by force because of a failure, from any thread; the rank that prints its report does."""

        def report() -> str:  # a file system that hangs holds it for a while only
            kept = self._keep(record)
            return kept.printed() if self.prints_report and not self.parent_prints else ""

        if self.on_force is not None:
            self.on_force()
        end_now(record.exit_code, report)


def propagation_on(channel: SideChannel) -> FailurePropagation:
    """Return the failure propagation of a side channel; the same one for as long as the channel lives."""
    return channel.get_or_create(FailurePropagation)
