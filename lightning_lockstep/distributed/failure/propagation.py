r"""What happens to the other ranks when one rank fails: one record, one message, three states, the same on every rank.

=========== ================== ================================================================================
message     from, to           body
=========== ================== ================================================================================
``failure`` any rank, rank 0;  "this run ends, because": fit, record, whether it ends every fit, connections to end
            rank 0, all        (of a diagnosis). Rank 0 sends on the first of a fit
``raised``  any rank, rank 0   fit: its sender has raised in it
``over``    rank 0, all        fit: all have raised in it, so that programs that have caught that may fit again
=========== ================== ================================================================================

=========== ================================== =================================================================
state       what it means                      what ends it
=========== ================================== =================================================================
running     nothing ends this fit              ``failure`` (failed), an own error (raised)
failed      `check` raises, the countdown runs an error, own or of `check` (raised), the end of the grace period
                                               (ended by force)
raised      this rank has raised               `begin_fit` (running)
=========== ================================== =================================================================

A rank that raises says so before its program can catch it, and goes on once rank 0 has confirmed that it prints the
record; without an answer within a third of the grace period it stands on its own. The others stop at the next boundary
of a training step, or when the collective breaks that they sit in, or by force. Nobody enters a barrier or destroys a
process group on the way out: both can wait for a dead peer.

Each rank counts its fits. A failure that is over stops nobody; one of a fit that this rank has not begun is kept; one
of the fit before stops it, because the rank that failed will not come. A rank that has raised waits half the grace
period until that is over. If it is not, this rank is alone with its error, and every further fit ends with it on all
ranks. So it does after the end of a process and after a diagnosis of the guard.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from lightning_lockstep.distributed.failure.connections import Connection, abort_devices, end_connections
from lightning_lockstep.distributed.failure.exit_notes import (
    forget_failure,
    keep_failure,
    note_failure,
    parent_reads_notes,
)
from lightning_lockstep.distributed.failure.process_exit import Ending, clock, end_now, outcome, set_ending
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    is_alike,
    is_broken_collective,
    own_place,
)
from lightning_lockstep.distributed.side_channel.channel import BACK_WITHIN, Message, SideChannel
from lightning_lockstep.errors import CollectiveError, LockstepError, RankFailedError

_FAILURE, _RAISED, _OVER = "failure", "failure/raised", "failure/over"
# How much longer than the grace period, after which it kills the ranks it has started, a rank may take to exit [s].
_CHILDREN_END = 6.0
# How long a report that is being written holds a forced end [s].
_REPORT_LIMIT = 60.0
# How long a message may take that is on its way already [s].
_ON_ITS_WAY = 1.0
_VANISHED = (
    "its connection has ended without a report: its process was killed, or was stopped for longer than silence_limit,"
    " or its host cannot be reached"
)

Ends = Collection[Connection]


class Failure(NamedTuple):
    """The first failure of a fit, or one that may be it."""

    fit: int
    record: FailureRecord
    is_last: bool = False  # whether it ends every fit from now on

    def body(self, ends: Ends = ()) -> list[Any]:
        return [self.fit, self.record.to_json(), self.is_last, list(ends)]

    @classmethod
    def from_body(cls, body: Any) -> Failure:
        fit, record, is_last, _ = body
        return cls(int(fit), FailureRecord.from_json(record), bool(is_last))


class FailurePropagation:
    """Informs every rank when one fails, and stops this one when it is another. Ranks: one object on every rank."""

    def __init__(self, channel: SideChannel) -> None:
        self.channel = channel
        self.grace_period = 10.0  # from the message of a failure to an end by force [s]
        # Returns the folder for reports of this run, or None if none are written; never raises.
        self.folder: Callable[[], Path | None] = lambda: None
        self.prints_report = channel.rank == 0  # of another rank's failure
        # Of the guard: asks why a collective broke here, and brings the error of a diagnosis to the thread that trains.
        self.explain: Callable[[BaseException], None] | None = None
        self.interrupt: Callable[[CollectiveError], None] | None = None
        self.state: Literal["running", "failed", "raised"] = "running"
        self.record: FailureRecord | None = None  # of the rank that failed first
        self.fit = 0  # its number; 0: none has begun
        self.news = threading.Condition()
        # The last fit that all ranks have begun; `fit` is later if a rank raises before they meet again.
        self._begun = 0
        self._told: Failure | None = None  # the latest that rank 0 has decided on
        self._last: FailureRecord | None = None  # ends every fit from now on
        self._over = -1  # the last fit whose failure is over
        # In which fit this rank has raised, when, and because of what.
        self._raised_in, self._raised_at = -1, 0.0
        self._raised_as: FailureRecord | None = None
        self._alone = False  # rank 0 does not answer
        self._keeps_own = False  # it ends in time by an error of its own
        self._topics: Counter[str] = Counter()
        self._listens = False
        self._later = clock.after  # on another thread
        # Of rank 0: the last fit in which each rank has raised.
        self._raised: dict[int, int] = {}

    @property
    def failed(self) -> bool:
        """Whether any rank is known to have failed; costs two attribute reads."""
        return self.record is not None

    def topic(self, name: str) -> str:
        """Return ``name`` with the number of the fit, and how often that has asked; the same on every rank."""
        self._topics[name] += 1
        return f"{name}/{self.fit}.{self._topics[name]}"

    def join(self) -> None:
        """Listen for failures without beginning a fit; the program has caught what this rank raised before."""
        self._listen()
        with self.news:
            self.fit = max(self._begun, self._over, self._raised_in) + 1
            self._leave_failure()

    def begin_fit(self) -> None:
        """Begin the next fit, or raise what ends it already. Ranks: all, before they meet in a collective."""
        self._listen()
        if self._raised_as is not None and not self._is_got_over():
            self._report(Failure(self.fit, self._raised_as, is_last=True))
        with self.news:
            self._leave_failure()
            if self.state == "running":
                self.fit = self._begun = max(self._begun, self._over) + 1
                self._topics.clear()
                self._apply()
        self.check()

    def check(self) -> None:
        """Raise here what ends this fit, if another rank has failed. Ranks: any, alone."""
        record = self.record
        if record is not None and (
            self.state == "failed" or record.kind == "collective" or record.rank != self.channel.rank
        ):
            raise self._stopped(record)

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return the error that this rank is to raise in place of one that ended its work."""
        # The first rank to fail informs the others and keeps its error, and so does a rank that raises an error of the
        # same type. A rank whose collective broke because of a failure gets a `RankFailedError` with the first one's
        # report: if an error looks like such a consequence, this rank asks the guard, and waits up to a third of the
        # grace period for the message.
        if isinstance(error, SystemExit) and error.code == (outcome.expected_exit_code or object()):
            return error
        if isinstance(error, RankFailedError):
            self._raises(self.record or self.describe(error))
            return error
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted(error)
        is_own = isinstance(error, (LockstepError, SystemExit))
        if self.record is None and not is_own and is_broken_collective(error):
            if self.explain is not None:
                self.explain(error)
            with self.news:
                # A rank that was killed counts as lost only after the time in which it could connect again.
                seconds = max(self.grace_period / 3, BACK_WITHIN + _ON_ITS_WAY)
                self.channel.wait_for(self.news, lambda: self.failed, seconds, needs_main=False)
        record = self.record
        is_explained = record is not None and record.kind == "collective"
        if record is not None and is_explained and (isinstance(error, CollectiveError) or not is_own):
            return self._stopped(record, error)
        first = self._first_failure(error)
        if first.rank == self.channel.rank or is_alike(error, first):
            return self._own(error, first)
        if not isinstance(error, SystemExit):
            return self._stopped(first)
        self._keep(first)
        return error  # ranks that leave by sys.exit() on purpose, all of them, keep their own exit codes

    def report_child_exit(self, rank: int, returncode: int, pid: int) -> None:
        """Inform all ranks that a rank started by this one has ended, with its ``Popen`` return code."""
        record = describe_exit(rank, self.channel.world_size, pid, returncode)
        self._report(Failure(self.fit, record, is_last=True))

    def report_diagnosis(self, error: CollectiveError, ends: Mapping[int, Ends]) -> bool:
        """On rank 0: let all ranks raise an error of the guard and end these connections, unless one has failed."""
        record = replace(self.describe(error), kind="collective")
        if not self._decide(Failure(self.fit, record, is_last=True), ends):
            return False
        self.channel.flush(0.5)  # before this rank ends the connections by which others would notice
        self._end_waits(record, ends.get(0, ()))
        return True

    # -- fits --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Begin to receive failures; by now grace period and folder are set."""
        if self._listens or self.channel.world_size == 1:
            return
        self._listens = True
        clock.start()
        self.channel.on(_FAILURE, self._take_failure)
        self.channel.on(_RAISED, lambda message: self._note_raised(message.sender, int(message.body)))
        self.channel.on(_OVER, lambda message: self._take_over(int(message.body)))
        self.channel.watch_peers(self._lost)

    def _is_got_over(self) -> bool:
        """Wait for a while until all ranks have raised in the fit in which this one has; return whether they have."""
        # Half the grace period at most: after all of it this rank is ended by force.
        left = self._raised_at + self.grace_period / 2 - time.monotonic()

        def is_over() -> bool:
            return self._over >= self._raised_in or self._last is not None or self.state == "failed"

        with self.news:
            return self.channel.wait_for(self.news, is_over, max(left, _ON_ITS_WAY))

    def _leave_failure(self) -> None:
        """Go back to "running" if this rank has raised, which the program has caught; another failure may stop it."""
        if self.state == "raised":
            self.state, self.record, self._keeps_own, self._alone = "running", None, False, False
            outcome.cancel_forced_exit()
            forget_failure()
        self._apply()

    def _note_raised(self, rank: int, fit: int) -> None:
        """On rank 0: the failure of a fit is over once all have raised in it, or in a later one."""
        with self.news:
            self._raised[rank] = fit
            over = min(self._raised.values()) if len(self._raised) == self.channel.world_size else self._over
            if over > self._over:
                self.channel.post(_OVER, over)
                self._take_over(over)

    def _take_over(self, fit: int) -> None:
        with self.news:
            self._over = max(self._over, fit)
            self.news.notify_all()

    # -- which failure is the first ---------------------------------------------------------------------

    def _first(self, after: int = -1) -> Failure | None:
        """Return the first failure that is known of this fit, or of one before that is not over, after ``after``."""
        told = self._told
        if told is not None and max(self._over, after) < told.fit <= self.fit:
            return told
        return None if self._last is None else Failure(self.fit, self._last, is_last=True)

    def _first_failure(self, error: BaseException) -> FailureRecord:
        """Return the record of the first failure in the fit in which this rank raises ``error``, perhaps its own."""
        if self.state == "raised" and self.record is not None:
            return self.record  # this rank has failed before: saving after a failure may fail too
        own = Failure(self.fit, self.describe(error))
        with self.news:
            was_running, self.state = self.state == "running", "raised"
        if self._first() is None:
            self._report(own)
        with self.news:
            first = self._first() or own
            if was_running:
                self._stops(first)
            self._raises(first.record)
            return first.record

    def _raises(self, record: FailureRecord) -> None:
        """Say that this rank raises: its own error or another one's."""
        with self.news:
            if self.state != "raised" or self._raised_in < self.fit:
                self.state, self._raised_in, self._raised_at = "raised", self.fit, time.monotonic()
                self._raised_as = record
                self.channel.post(_RAISED, self._raised_in, to=0)

    def _report(self, failure: Failure) -> None:
        """Have rank 0 decide about a failure, and wait for its answer; without one this rank stands on its own."""
        if self.channel.rank == 0:
            if self._decide(failure):
                self.channel.flush(1.0)
            return
        self.channel.post(_FAILURE, failure.body(), to=0)
        waits = failure.record.kind != "interrupt"
        if not waits:
            self.channel.flush(1.0)

        def is_answered() -> bool:
            return self._last is not None if failure.is_last else self._first() is not None

        with self.news:
            if not (waits and self.channel.wait_for(self.news, is_answered, self.grace_period / 3)):
                self._decide(failure)

    def _decide(self, failure: Failure, ends: Mapping[int, Ends] | None = None) -> bool:
        """Settle on the first failure of a fit: on rank 0 for all ranks, on one that it does not answer for itself."""
        record = failure.record.in_folder(self.folder())
        if record.ended and not record.where:  # it cannot say where it was; the other ranks are near
            record = replace(record, where=own_place())
        failure = failure._replace(record=record)
        with self.news:
            told = self._told if self._told is not None and self._told.fit > self._over else None
            if failure.is_last:  # what a rank has said explains more than a diagnosis
                if self._last is not None or (told is not None and record.kind == "collective"):
                    return False
            elif failure.fit <= self._over or (told is not None and told.fit <= failure.fit):
                return False  # its sender has been told which was the first
            if self.channel.rank != 0:
                self._alone = True
            else:
                for rank in range(1, self.channel.world_size):
                    body = failure.body(ends.get(rank, ()) if ends else ())
                    self.channel.post(_FAILURE, body, to=rank)
            self._take(failure)
            return True

    def _take_failure(self, message: Message) -> None:
        failure = Failure.from_body(message.body)
        if self.channel.rank == 0:
            self._decide(failure)
            return
        self._take(failure)
        if failure.record.kind == "collective":
            ends = [(here, there) for here, there in message.body[-1]]
            self._later(0.0, self._end_waits, failure.record, ends)

    def _take(self, failure: Failure) -> None:
        """Take over what rank 0 has decided."""
        with self.news:
            if failure.is_last:
                self._last = self._last or failure.record
            else:
                self._told = failure
                if self.state == "raised" and failure.fit < self._begun:  # the fit before had failed already
                    self.fit = self._begun = self._raised_in = failure.fit
                    self.channel.post(_RAISED, self._raised_in, to=0)
            self._apply()
            self.news.notify_all()

    def _apply(self) -> None:
        """Let the failure of this fit stop this rank, unless it has raised because of that."""
        first = self._first(after=self._raised_in)
        if self.state == "running" and first is not None:
            self.state = "failed"
            self._stops(first)

    def _stops(self, failure: Failure) -> None:
        """Take a failure for the one that ends the fit of this rank, and start the countdown."""
        self.record = failure.record
        if failure.fit > self._raised_in:
            self.fit, self._begun = failure.fit, min(self._begun, failure.fit)
        self._later(self.grace_period * 0.9, self._grace_ends, failure.record)

    def _end_waits(self, record: FailureRecord, ends: Ends) -> None:
        """Have the thread that trains raise the error of a diagnosis, and end what it waits in."""
        if self.state == "failed" and self.interrupt is not None:
            self.interrupt(record.collective_error())
        end_connections(ends)
        abort_devices()

    # -- processes that have ended -----------------------------------------------------------------------

    def _lost(self, rank: int) -> None:
        host, pid = self.channel.process_of(rank)
        record = FailureRecord(rank, self.channel.world_size, host, pid, "vanished", _VANISHED)
        failure = Failure(self.fit, record, is_last=True)
        if rank != 0:  # on another thread, because this one must not wait
            self._later(0.0, self._report, failure)
            return
        with self.news:
            # Every rank notices this by itself and decides alone; another rank must print, because rank 0 is gone.
            if self._first() is None:
                speaks = self.channel.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
                self.prints_report = self.prints_report or speaks
            self._decide(failure)

    # -- the error that this rank raises ----------------------------------------------------------------

    def _own(self, error: BaseException, first: FailureRecord) -> BaseException:
        """Settle how this rank's own error is printed: by rank 0, or by this rank if rank 0 has not answered."""
        # An error of this package is one of all ranks: each keeps its own, and all end in good order.
        is_first, is_ours = first.rank == self.channel.rank, isinstance(error, LockstepError)
        self._keeps_own = is_first or is_ours or not parent_reads_notes()
        record = self._keep(first)
        headline, saved = record.headline(), record.saved_to()
        ending = Ending(saved, headline=headline)
        if not self.prints_report and not self._alone:
            ending = Ending(replaces=True)
        elif not is_first and self.describe(error).summary != first.summary:
            ending = Ending(record.printed(), headline=f"lightning-lockstep: {headline}")
        elif is_first and not is_ours:
            ending.text = f"{headline}\n{saved}".rstrip()
        set_ending(error, ending)
        if is_ours:
            if first.kind != "collective":
                self.record = None  # they may still meet, as to save a checkpoint
            return error
        ending.deadline, ending.exit_code = self.grace_period + _CHILDREN_END, record.exit_code
        if is_first:
            # Of a SystemExit Python prints nothing, and nobody can see later whether the program has caught it.
            exits = isinstance(error, SystemExit)
            report = record.printed() if exits and self.prints_report and not parent_reads_notes() else ""
            outcome.force_exit_at_shutdown(record.exit_code, report, unless_caught=not exits)
            if threading.current_thread() is not threading.main_thread() and hasattr(error, "add_note"):
                # Not in Python 3.10. Whoever runs this thread prints the error: Ray Train, on the driver.
                error.add_note(f"\n{headline}\n{saved}".rstrip())
        return error

    def _interrupted(self, error: BaseException) -> BaseException:
        """Ctrl-C reaches every rank of a terminal by itself: report it once, wait for nobody."""
        first = self._keep(self._first_failure(error))
        self._keeps_own = first.kind == "interrupt"
        outcome.force_exit_at_shutdown(130)
        return error

    def _stopped(self, record: FailureRecord, error: BaseException | None = None) -> BaseException:
        """Return what this rank raises because of a record, if need be in place of ``error``."""
        if record.kind == "interrupt":
            return self._interrupted(KeyboardInterrupt())
        self._raises(record)
        if record.kind == "collective":
            return self._own(
                error if isinstance(error, CollectiveError) else record.collective_error(), record
            )
        record = self._keep(record)
        stopped = RankFailedError(record.report(), record)
        outcome.force_exit_at_shutdown(record.exit_code)
        set_ending(stopped, Ending(record.printed() if self.prints_report else "", replaces=True))
        return stopped

    def describe(self, error: BaseException) -> FailureRecord:
        """Return the record of an error that was raised here."""
        return describe_error(error, self.channel.rank, self.channel.world_size)

    def _keep(self, record: FailureRecord) -> FailureRecord:
        """Leave the notes of a failure, and on the rank that prints it the file that the record names."""
        prints = self.prints_report or record.rank == self.channel.rank
        if prints and (self.channel.rank == 0 or self._alone):
            record = keep_failure(record)
        note_failure(record)
        return record

    # -- the end by force ------------------------------------------------------------------------------------

    def _grace_ends(self, record: FailureRecord) -> None:
        """End this process by force, unless it deals with the failure."""
        if outcome.writes_report.acquire(timeout=_REPORT_LIMIT):
            outcome.writes_report.release()
        # Not if the program has caught the failure and goes on, or if this rank ends by its own error. A forked or
        # spawned rank does not: Python calls no excepthook there, so nothing would end it.
        if self.record is record and not outcome.failure_returned and not self._keeps_own:
            self.end_now(record)

    def end_now(self, record: FailureRecord) -> NoReturn:
        """End this process by force because of a failure, from any thread; prints the report if this rank is to."""

        def report() -> str:  # a file system that hangs holds it for a while only
            kept = self._keep(record)
            return kept.printed() if self.prints_report and not parent_reads_notes() else ""

        end_now(record.exit_code, report)


def propagation_on(channel: SideChannel) -> FailurePropagation:
    """Return the failure propagation of a side channel; the same one for as long as the channel lives."""
    return channel.get_or_create(FailurePropagation)
