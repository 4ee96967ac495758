"""What happens to the other ranks when one rank fails.

The rank that fails first claims that over the side channel, sends every rank its record, and waits a moment
for rank 0 to confirm that it will print the report. The others stop where they are: at the next boundary of a
training step, or when the collective they sit in breaks, or, at the end of the grace period, by force. Nobody
enters a barrier or destroys a process group on the way out: both can wait for a dead peer.

    failing rank                            every other rank
    ------------                            ----------------
    error_to_raise(error) -- record  ---->  receiving thread: remember it, start the countdown
                          <-- confirmation  (rank 0)
    raise error                             check() / error_to_raise(error) raise RankFailedError
    exit                                    countdown over: print the report (rank 0), end by force
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lightning_lockstep.distributed.failure.first_failure import (
    BETTER_REPORT,
    REPORT_LIMIT,
    FirstFailure,
    LostPeers,
)
from lightning_lockstep.distributed.failure.process_exit import (
    end_now,
    expected_exit,
    failure_returned,
    leave_without_waiting,
    stay,
    wait_for_reports,
)
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    forget_failure,
    is_alike,
    is_broken_collective,
    note_failure,
    note_for_torchrun,
)
from lightning_lockstep.distributed.failure.uncaught import (
    end_within,
    fold_tracebacks,
    keep_quiet,
    print_also,
    print_instead,
    print_last,
)
from lightning_lockstep.distributed.side_channel.channel import SideChannel
from lightning_lockstep.errors import LockstepError, RankFailedError

# How much longer than the grace period, in which it waits for the ranks it has started, a rank may take to exit [s].
_CHILDREN_END = 2.0


class FailurePropagation:
    """Informs every rank when one fails, and stops this one when it is another.

    Args:
        channel: The side channel of the run.
        grace_period: Time from the message of a failure until this process is ended by force [s].
        where: Returns what this rank is doing, for the record; called on failure only.
        prints_report: Whether this rank prints the report of another rank's failure; by default rank 0 does.
        on_force: Called before this process ends itself by force, to end its child ranks first.

    Attributes:
        parent_prints: Whether the process that started this rank, and is no rank, prints the report.
        explain: Returns the error that all ranks raise in place of one that was raised here, or ``None``.

    Ranks: one object on every rank. Nothing is sent until a rank fails.
    """

    def __init__(
        self,
        channel: SideChannel,
        *,
        grace_period: float = 10.0,
        where: Callable[[], Mapping[str, Any]] = dict,
        prints_report: bool | None = None,
        on_force: Callable[[], None] | None = None,
    ) -> None:
        self.channel, self.grace_period, self.where = channel, grace_period, where
        self.prints_report = channel.rank == 0 if prints_report is None else prints_report
        self.parent_prints = False
        self.explain: Callable[[BaseException], BaseException | None] | None = None
        self.on_force = on_force
        self._interrupted_here = self._raised_alike_here = False
        self._first = FirstFailure(channel, grace_period=lambda: self.grace_period, found=self._found)
        self._lost = LostPeers(channel, patience=lambda: self.grace_period / 4, then=self._take_lost)

    @property
    def record(self) -> FailureRecord | None:
        """The record of the rank that failed first, or ``None``."""
        return self._first.record

    @property
    def failed(self) -> bool:
        """Whether any rank is known to have failed; costs two attribute reads."""
        return self._first.record is not None

    def has_raised(self, rank: int) -> bool:
        """Return whether a rank has said that it raises an error of this package, which all ranks may raise alike."""
        return self._first.common.of(rank) is not None

    def arm(self) -> None:
        """Begin anew: what this rank raised before was caught by the program.

        A rank that goes on lets the others know, so that they forget its failure, too.

        Raises:
            RankFailedError: Another rank has failed, and this one had not noticed yet; or it has failed since, in the
                attempt that begins here.

        Ranks: every rank, at the start of a fit; sends a message only if this rank had raised.
        """
        if self._first.begin():
            self._interrupted_here = self._raised_alike_here = False
            stay()
            forget_failure()
        self.check()

    def check(self) -> None:
        """Stop here if another rank has failed.

        Raises:
            RankFailedError: Another rank has failed.

        Ranks: any rank, alone; two attribute reads while nothing is wrong.
        """
        record = self._first.record
        if record is not None and record.rank != self.channel.rank:
            raise self._stopped(record)

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Turn an error that ended this rank's work into the one it should raise.

        The first rank to fail informs the others and keeps its own error, and so does a rank that raises an error
        of the same type: all raise it alike. A rank whose collective broke because of a failure gets a
        :class:`RankFailedError` that carries the first one's report.

        Args:
            error: What was raised here.

        Returns:
            The error to raise.

        Ranks: the rank whose work was ended; waits up to a third of the grace period for the message of an
            earlier failure when the error looks like the consequence of one, and as long for the confirmation
            that another rank prints the report.
        """
        agreed = isinstance(error, SystemExit) and error.code == (expected_exit() or object())
        self._first.raised_here = not agreed
        if isinstance(error, RankFailedError) or agreed:
            return error
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted(error)
        if self.explain is not None and not isinstance(error, SystemExit):
            error = self.explain(error) or error
        if isinstance(error, LockstepError):
            return self._raised_in_common(error)
        if is_broken_collective(error):
            self._wait_for_cause()
        record = self._first.record or self._announce(self._describe(error))
        if record.rank != self.channel.rank:
            if is_alike(error, record):
                return self._raised_alike(error, record)
            if not isinstance(error, SystemExit):
                return self._stopped(record)
            note_failure(record)
            return error  # ranks that leave by sys.exit() on purpose, all of them, keep their own exit codes
        return self._raised_first(error, record)

    def _raised_first(self, error: BaseException, record: FailureRecord) -> BaseException:
        """Raise the own error; rank 0 prints it, or this rank does where rank 0 has not confirmed that."""
        if self._first.confirmed or self.prints_report:
            # Python itself prints nothing of a SystemExit.
            says = isinstance(error, SystemExit) and self.prints_report and not self.parent_prints
            report = record.printed() if says else ""
            # Of a SystemExit nobody can see later whether the program has caught it.
            leave_without_waiting(record.exit_code, report, unless_caught=not isinstance(error, SystemExit))
        if not self.prints_report and self._first.confirmed:
            keep_quiet(error)
        elif self.prints_report and record.shown_by_torchrun:
            print_instead(error, record.printed())
        print_last(error, record.headline())
        return self._ends(error, record)

    def _raised_alike(self, error: BaseException, record: FailureRecord) -> BaseException:
        """Keep an own error, which ends this process in time unless the program catches it."""
        self._raised_alike_here = True
        note_failure(record)
        if not self.prints_report:
            keep_quiet(error)
        elif self._describe(error).summary != record.summary:
            print_also(error, record.printed())
        elif record.shown_by_torchrun:
            print_instead(error, record.printed())
        return self._ends(error, record)

    def _ends(self, error: BaseException, record: FailureRecord) -> BaseException:
        """Let an own error, if nobody catches it, end this process within the time that its children get."""
        end_within(error, self.grace_period + _CHILDREN_END, record.exit_code, on_force=self.on_force)
        return error

    def _wait_for_cause(self) -> None:
        """Wait for the message of the failure that broke a collective here."""
        self._first.wait(self.grace_period / 3)
        if self._lost.any:
            self._first.wait(BETTER_REPORT)
        if self._first.record is not None:
            return
        if (early := self._first.early()) is not None:
            self._first.take(early)
        elif (alone := self._first.common.any()) is not None:
            self._announce(alone)

    def report_child_exit(self, rank: int, returncode: int, pid: int) -> None:
        """Inform all ranks that a rank started by this one has failed.

        Args:
            rank: Its number.
            returncode: As :class:`subprocess.Popen` gives it.
            pid: Its process id.

        Ranks: the rank that started it, from its watching thread.
        """
        said = self._first.common.of(rank)
        if said is not None:
            if not self._first.common.raised_here:
                self._announce(said)
            return
        kind, summary, code = describe_exit(returncode)
        host = socket.gethostname()
        self._announce(FailureRecord(rank, self.channel.world_size, host, pid, kind, summary, exit_code=code))

    def close(self) -> None:
        """Stop listening."""
        self._first.close()

    def _raised_in_common(self, error: BaseException) -> BaseException:
        """Errors of this package are raised on every rank alike: each keeps its own, rank 0 prints it."""
        # Should this one be raised on one rank alone after all, the others take it for a failure after half
        # the grace period, or when this rank exits. Rank 0 confirms either way that it prints what is to be
        # printed.
        record = self._describe(error)
        self._first.common.post(record)
        note_for_torchrun(record.headline(), of=error)
        fold_tracebacks()  # so that the note is taken back if another error ends this process
        if not self.prints_report:
            if self._first.wait_for_confirmation():
                keep_quiet(error)
        else:
            self.channel.flush(1.0)
        return error

    def _interrupted(self, error: BaseException) -> BaseException:
        """Ctrl-C reaches every rank of a terminal by itself: report it once, wait for nobody."""
        self._interrupted_here = True
        note_failure(self._first.record or self._announce(self._describe(error)))
        leave_without_waiting(130)
        return error

    def _describe(self, error: BaseException) -> FailureRecord:
        return describe_error(error, self.channel.rank, self.channel.world_size, self.where)

    def _announce(self, record: FailureRecord) -> FailureRecord:
        """Announce a failure; return the record of the first one, which may be another."""
        first = self._first.announce(record)
        if first.rank == self.channel.rank:
            note_failure(first)
            if self.channel.rank != 0 and first.kind != "interrupt":
                self._first.wait_for_confirmation()
        return self._first.record or first

    def _found(self, record: FailureRecord) -> None:
        """Start the countdown: another rank has failed."""
        threading.Thread(target=self._count_down, args=(record,), name="lockstep-grace", daemon=True).start()

    def _take_lost(self, record: FailureRecord) -> None:
        """A rank is gone or silent; nobody who has started it has said why."""
        first = self._first
        said = first.common.of(record.rank)
        if first.record is not None or (said is not None and first.common.raised_here):
            return
        said = said or first.early(record.rank)
        if record.rank != 0:
            self._announce(said or record)
            return
        if said is None:  # with rank 0 the one that prints is gone
            speaks = self.channel.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
            self.prints_report = self.prints_report or speaks
        first.take(said or record)

    def _stopped(self, record: FailureRecord) -> BaseException:
        if record.kind == "interrupt":
            return self._interrupted(KeyboardInterrupt())
        error = RankFailedError(record.report(), record)
        note_failure(record)
        leave_without_waiting(record.exit_code)
        if self.prints_report:
            print_instead(error, record.printed())
        else:
            keep_quiet(error)
        return error

    def _count_down(self, record: FailureRecord) -> None:
        time.sleep(self.grace_period * 0.9)
        wait_for_reports(REPORT_LIMIT)
        if self._first.record is not record or failure_returned():
            return  # the program has caught it and goes on
        if self._raised_alike_here and not self.parent_prints:
            return  # this rank has an error of its own, and ends by it unless the program has caught it
        if record.kind == "interrupt" and self._interrupted_here:
            return  # Ctrl-C came here too, and the program has handled it
        note_failure(record)
        if self.on_force is not None:
            self.on_force()
        prints = self.prints_report and not self.parent_prints
        end_now(record.exit_code, record.printed() if prints else "")


def propagation_on(channel: SideChannel) -> FailurePropagation:
    """Return the failure propagation of a side channel; the same one for as long as the channel lives."""
    return channel.get_or_create(FailurePropagation)
