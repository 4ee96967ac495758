r"""What happens to the other ranks when one rank fails: attempts of all ranks, one record each, four states.

An attempt is one fit, or another call of a Trainer, over one process group and one side channel, by all ranks that are
members of that group. Each rank counts those that it has entered; that number names an attempt.

======= ============================================= ==========================================================
state   what it means                                 what ends it
======= ============================================= ==========================================================
running nothing ends this attempt                     a failure (failed, or raised if it is its own), its end (over)
failed  another rank has failed. A second later an    what this rank raises because of it (raised); else the end of
        interrupt ends what this one waits in         the grace period, by force
raised  this rank raises, and waits for nobody        its Trainer is done (over); else as above
over    nothing ends this rank; failures are kept     `enter` (running)
======= ============================================= ==========================================================

There is one message, ``failure``: number and record, from any rank to rank 0, and from rank 0 to all. Rank 0 sends
on the first of an attempt. The end of a process is one of every attempt from then on; if the others outlive it, it ends
these attempts and no rank (`lose`). A rank that has not entered the attempt of a failure keeps it until then; one that
is over with it goes on.

A rank that raises says so before its program can catch it, and goes on once rank 0 has confirmed that it prints the
record; without an answer within a third of the grace period it stands on its own. The others stop at the next boundary
of a training step, when their wait ends, or by force. Nobody enters a barrier or destroys a process group on the way
out: both can wait for a dead peer.

Ranks begin every attempt but the first with a gather (`meet`). If one of them has seen the last one fail, all connect
anew: another attempt has another process group. A rank whose program ends meanwhile ends that gather.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import psutil

from lightning_lockstep._lightning import SIGTERMException
from lightning_lockstep._system import on_ctrl_c
from lightning_lockstep.distributed.failure.interrupt import (
    Interrupt,
    Process,
    abort_devices,
    connections_with,
    end_connections,
    keep_from_forks,
)
from lightning_lockstep.distributed.failure.process_exit import (
    Ending,
    clock,
    end_now,
    interrupt_clock,
    outcome,
    set_ending,
)
from lightning_lockstep.distributed.failure.record import (
    FailureRecord,
    describe_error,
    describe_exit,
    forget_failure,
    is_alike,
    is_broken_collective,
    keep_failure,
    leaves_in_order,
    note_failure,
    own_place,
)
from lightning_lockstep.distributed.side_channel.channel import BACK_WITHIN, Message, SideChannel
from lightning_lockstep.distributed.side_channel.gather import Gather
from lightning_lockstep.errors import CollectiveError, LockstepError, RankFailedError

_FAILURE, _MEETING = "failure", "the begin of a run"
# Ranks that raise the same error may come to that so much later than the first [s]; then their waits are ended.
_MAY_RAISE_THE_SAME = 1.0
# How much longer than the grace period, after which it kills the ranks it has started, a rank may take to exit [s].
_CHILDREN_END = 6.0
# How long a message may take that is on its way already [s].
_ON_ITS_WAY = 1.0
# How often a rank looks whether those of its host have ended [s].
_LOOK_EVERY = 0.02
_VANISHED = (
    "its connection has ended without a report: its process was killed, or was stopped for longer than silence_limit,"
    " or its host cannot be reached"
)
_GONE = "its process has ended without a report: it was killed, or it has ended itself"
_LEFT = "its program has ended while other ranks wait for it"
# The number of the attempt in a message about the end of a process: it is a failure of every attempt from then on.
_EVER = -1


def _runs(pid: int) -> bool:
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


class FailurePropagation:
    """Informs every rank when one fails, and stops this one when it is another. Ranks: one object on every rank."""

    def __init__(self, channel: SideChannel) -> None:
        self.channel = channel
        self.grace_period = 10.0  # from the message of a failure to an end by force [s]
        # Returns the folder for reports of this run, or None if none are written; never raises.
        self.folder: Callable[[], Path | None] = lambda: None
        self.prints_report = channel.rank == 0  # of another rank's failure
        self.check_told_to_end: Callable[[], None] = lambda: None  # raises if this rank has got SIGTERM
        self.guard: Any = None  # of this channel, if it is on: finds out why a collective broke here
        self.store_port = 0  # of the store at which the ranks have met
        self.number = 0  # of the attempt: how many this rank has entered
        self.state: Literal["running", "failed", "raised", "over"] = "over"
        self.record: FailureRecord | None = None  # of the rank that failed first in this attempt
        self._known: dict[int, FailureRecord] = {}  # the first failure of each attempt that has one
        self._since = 0.0  # when the record was known here, of a monotonic clock [s]
        self._outlived = False  # a member is lost: that ends all attempts over this group, and no rank
        self._alone = False  # rank 0 does not answer
        self._keeps_own = False  # it ends in time by an error of its own
        self._topics: Counter[str] = Counter()
        self._interrupt = Interrupt(self._pending)
        self._meeting: Gather | None = None
        self._at_end = False  # rank 0's program begins no further attempt

    @property
    def failed(self) -> bool:
        """Whether any rank is known to have failed; costs two attribute reads."""
        return self.record is not None

    def topic(self, name: str) -> str:
        """Return ``name`` with the number of the attempt, and how often that has asked; the same on every rank."""
        self._topics[name] += 1
        return f"{name}/{self.number}.{self._topics[name]}"

    # -- attempts ----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Enter the next attempt; the program has caught what this rank has raised before. Ranks: any, alone."""
        self._listen()
        self._interrupt.install()
        with self.channel.news:
            if self.record is not None:
                outcome.cancel_forced_exit()
                forget_failure()
            self.number, self.state, self.record = self.number + 1, "running", None
            self._keeps_own = self._alone = False
            self._topics.clear()
            self._apply()

    def meet(self, timeout: float, *, renews: bool = False) -> bool:
        """Begin the attempt, or raise what ends it already; return whether to connect anew. Ranks: all; a gather."""
        # `renews`: this rank wants to, because its Trainer has other options.
        if self._meeting is None or self.channel.world_size == 1:
            return False
        self.check()
        self._meeting.timeout = timeout
        has_failed = any(number < self.number for number in self._known)
        return any(self._meeting.collect(self.number, has_failed or renews).complete("The begin of a run"))

    def have_met(self, processes: Sequence[Process], store_port: int) -> None:
        """Note where the ranks are that have met; processes that this one forks have no connections with them."""
        self.channel.processes.update(enumerate(processes))
        self.store_port = store_port
        keep_from_forks(connections_with(processes))

    def leave(self) -> None:
        """Be over with this attempt: nothing ends this rank any more until it enters another one."""
        with self.channel.news:
            self.state = "over"

    def check(self) -> None:
        """Raise here what ends this attempt, if another rank has failed. Ranks: any, alone."""
        record = self.record
        may_be_own = self.state in ("raised", "over")
        if record is not None and not (may_be_own and record.rank == self.channel.rank):
            raise self._error_because_of(record)

    def ends_wait(self) -> bool:
        """Raise what ends a wait for others, or return whether this rank has raised that and must wait for nobody."""
        if self.state in ("running", "over") and self.channel.has_closed(0):
            self._note_left(0)
        record, ended = self.record, self._known.get(_EVER)
        if self.state == "over" and ended is not None:
            raise RankFailedError(ended.report(), ended)
        if self.state == "running":
            self.check_told_to_end()
        elif self.state == "failed" and record is not None:
            # All ranks may raise the same, one a moment before another.
            may_be_of_all = record.kind == "exception" and self.channel.usable
            is_new = time.monotonic() - self._since < _MAY_RAISE_THE_SAME
            if not (may_be_of_all and is_new):
                self.check()
        return self.state == "raised" and record is not None

    def error_to_raise(self, error: BaseException) -> BaseException:
        """Return the error that this rank is to raise in place of one that ended its work."""
        # The first rank to fail informs the others and keeps its error, and so does a rank that raises an error of the
        # same type. A rank whose collective broke because of a failure gets a `RankFailedError` with the first one's
        # report.
        if isinstance(error, SystemExit) and error.code == (outcome.expected_exit_code or object()):
            return error
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted(error)
        is_told_to_end = isinstance(error, SIGTERMException)
        if is_told_to_end and not self.failed:
            self._note_ended()
        is_own = isinstance(error, (LockstepError, SystemExit))
        if not self.failed:
            self._wait_for_cause(error, is_broken=not is_own and is_broken_collective(error))
        if isinstance(error, RankFailedError):
            if self.record is not None and self.state == "failed":
                return self._error_because_of(self.record)
            self._has_raised(self.record or self.describe(error))
            return error
        record = self.record
        is_explained = record is not None and record.kind == "collective"
        if record is not None and is_explained and (isinstance(error, CollectiveError) or not is_own):
            return self._error_because_of(record, error)
        first = self._first_failure(error)
        if first.rank == self.channel.rank or is_alike(error, first):
            return self._with_own_ending(error, first)
        if is_told_to_end or not isinstance(error, SystemExit):
            return self._error_because_of(first)
        if not leaves_in_order(error):
            self._keep(first)
        return error  # ranks that leave by sys.exit() on purpose, all of them, keep their own exit codes

    def _wait_for_cause(self, error: BaseException, *, is_broken: bool) -> None:
        """If an error looks like a consequence of another rank's failure, wait for news of that."""
        is_told = isinstance(error, RankFailedError) and error.record is None  # as by in_rank_order
        if is_broken and self.guard is not None:
            self.guard.explain(error)
        if is_broken or is_told:
            # A rank that was killed counts as lost only after the time in which it could connect again.
            seconds = max(self.grace_period / 3, BACK_WITHIN + _ON_ITS_WAY)
            self.channel.wait_for(lambda: self.failed, seconds, stops=False)

    def report_child_exit(self, rank: int, returncode: int, pid: int) -> FailureRecord:
        """Inform all ranks that one that this rank has started has ended; return what is known of who failed first."""
        ended = describe_exit(rank, self.channel.world_size, pid, returncode)
        self._report(_EVER, ended)
        return self.record or self._known.get(_EVER) or ended

    def report_diagnosis(self, error: CollectiveError) -> bool:
        """On rank 0: let all ranks raise an error of the guard, unless one has failed."""
        return self._decide(self.number, replace(self.describe(error), kind="collective"))

    def come_to_end(self) -> None:
        """Note, on rank 0, that this program begins no further attempt, and end the wait of ranks that do."""
        self._at_end = True
        self._note_if_awaited()

    def lose(self, record: FailureRecord) -> None:
        """End all attempts over this group, but no rank, because the others outlive one. Ranks: any, alone."""
        with self.channel.news:
            self._outlived = True
            self._known.setdefault(_EVER, record)
            self._apply()
            self.channel.news.notify_all()

    def report_lost_parent(self) -> None:
        """Note, on a rank that rank 0 has started, that its process has ended."""
        self._lost(0, _GONE)
        self.channel.lose(0)

    # -- which failure is the first ---------------------------------------------------------------------

    def _listen(self) -> None:
        """Begin to receive failures; by now grace period and folder are set."""
        if self._meeting is not None or self.channel.world_size == 1:
            return
        self._meeting = Gather(self.channel, _MEETING, watched=True)
        clock.start()
        interrupt_clock.start()
        self._meeting.on_entry = self._note_if_awaited
        self.channel.on(_FAILURE, self._take_failure)
        self.channel.watch_peers(self._lost, lambda rank: self._note_if_awaited())
        self.channel.ends_wait = self.ends_wait
        self.channel.at_close(self._interrupt.remove)

    def _note_if_awaited(self) -> None:
        """On rank 0: see whether ranks wait at the begin of an attempt for one whose program has come to its end."""
        if self._meeting is not None and self._meeting.is_awaited:
            for rank in range(self.channel.world_size):
                if self.channel.has_closed(rank) or (rank == 0 and self._at_end):
                    self._note_left(rank)

    def _note_left(self, rank: int) -> None:
        self._decide(_EVER, self._end_of(rank, "exit", _LEFT))

    def _end_of(self, rank: int, kind: Literal["exit", "vanished"], why: str) -> FailureRecord:
        return FailureRecord(
            rank, self.channel.world_size, *self.channel.process_of(rank), kind, why, exit_code=1
        )

    def _first_failure(self, error: BaseException) -> FailureRecord:
        """Return the record of the first failure in the attempt of this rank, perhaps that of its own ``error``."""
        if self.state == "raised" and self.record is not None:
            return self.record  # this rank has failed before: saving after a failure may fail too
        own = self.describe(error)
        with self.channel.news:
            was_running, self.state = self.state == "running", "raised"
        if self._first() is None:
            self._report(self.number, own)
        with self.channel.news:
            first = self._first() or own
            if was_running:
                self._begin_to_end(first)
            return first

    def _has_raised(self, record: FailureRecord) -> None:
        with self.channel.news:
            self.state, self.record = "raised", self.record or record

    def _first(self) -> FailureRecord | None:
        """Return the first failure of this attempt, as far as is known."""
        return self._known.get(self.number) or self._known.get(_EVER)

    def _report(self, number: int, record: FailureRecord) -> None:
        """Have rank 0 decide about a failure, and wait for its answer; without one this rank stands on its own."""
        if self.channel.rank == 0:
            if self._decide(number, record):
                self.channel.flush(1.0)
            return
        self.channel.post(_FAILURE, [number, record.to_json()], to=0)
        seconds = _ON_ITS_WAY if record.kind == "interrupt" else self.grace_period / 3
        if not self.channel.wait_for(
            lambda: number in self._known or _EVER in self._known, seconds, stops=False
        ):
            self._decide(number, record)

    def _decide(self, number: int, record: FailureRecord) -> bool:
        """Settle on the first failure of an attempt: on rank 0 for all, on one that it does not answer for itself."""
        record = record.in_folder(self.folder())
        if record.ended and not record.where:  # it cannot say where it was; the other ranks are near
            record = replace(record, where=own_place())
        with self.channel.news:
            if number in self._known:
                return False  # what a rank has said explains more than a diagnosis
            if number == _EVER:  # or than that its process has ended
                record = next((one for one in self._known.values() if one.rank == record.rank), record)
            if self.channel.rank != 0:
                self._alone = True
            else:
                self.channel.post(_FAILURE, [number, record.to_json()])
            self._take(number, record)
            return True

    def _take_failure(self, message: Message) -> None:
        number, text = message.body
        record = FailureRecord.from_json(text)
        if self.channel.rank == 0:
            self._decide(number, record)
        else:
            self._take(number, record)

    def _take(self, number: int, record: FailureRecord) -> None:
        with self.channel.news:
            if record.kind == "collective" and self.state == "running":
                number = self.number  # it may be the one that others wait for at the begin of the next
            # The end of a process often comes of a failure that is known, or is that of a rank that has raised.
            is_new = self._first() is None and record not in self._known.values()
            self._known.setdefault(number, record)
            if self.state == "over" and is_new and number in (_EVER, self.number):
                self._say(record)
            self._apply()
            self.channel.news.notify_all()

    def _apply(self) -> None:
        """Let a failure of this attempt stop this rank."""
        first = self._first()
        if self.state == "running" and first is not None:
            self.state = "failed"
            self._begin_to_end(first)

    def _say(self, record: FailureRecord) -> None:
        """Print a failure that does not end this rank, because it is over with the attempt."""
        if self.prints_report and record.rank != self.channel.rank and record.kind != "interrupt":
            interrupt_clock.after(0.0, lambda: outcome.say_last(self._keep(record).printed()))

    def _begin_to_end(self, record: FailureRecord) -> None:
        """Take a failure for the one that ends this attempt, and start the countdown."""
        self.record, self._since = record, time.monotonic()
        if self._outlived:
            # Whoever follows the members ends what this rank waits for, but not what the program does by itself.
            clock.after(self.grace_period, self._interrupt.raise_soon)
            return
        at_once = record.kind == "collective"
        interrupt_clock.after(0.0 if at_once else _MAY_RAISE_THE_SAME, self._end_waits, record)
        clock.after(self.grace_period * 0.9, self._grace_ends, record)

    # -- what ends a wait --------------------------------------------------------------------------------

    def _pending(self) -> BaseException | None:
        """Return what this rank still has to raise because of a failure."""
        record = self.record
        if record is None or self.state != "failed":
            return None
        if record.kind == "collective":
            return record.collective_error()
        return KeyboardInterrupt() if record.kind == "interrupt" else RankFailedError(record.report(), record)

    def _end_waits(self, record: FailureRecord) -> None:
        """Have the thread that trains raise, and end what it waits in."""
        if self.record is not record or self._pending() is None:
            return
        self.channel.flush(0.5)  # before this rank ends the connections by which others would notice
        self._interrupt.raise_soon()
        self.end_connections()
        abort_devices()

    def end_connections(self) -> None:
        """Shut down this rank's connections with the others but those of channel and store: they may wait for it."""
        ranks = self.channel.processes.values()
        end_connections(connections_with(ranks, {self.channel.port, self.store_port} - {0}))

    # -- processes that have ended -----------------------------------------------------------------------

    def _lost(self, rank: int, why: str = _VANISHED) -> None:
        with self.channel.news:
            # Every rank notices the end of rank 0 by itself and decides alone; then another rank must print.
            if rank == 0 and self._first() is None:
                speaks = self.channel.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
                self.prints_report = self.prints_report or speaks
            self._decide(_EVER, self._end_of(rank, "vanished", why))

    def _note_ended(self) -> None:
        """Report ranks of this host whose process is gone: a launcher such as torchrun then ends the others."""
        for rank, pid in self._others_here().items():
            if _runs(pid) or self.channel.has_closed(rank):
                continue
            if rank == 0:
                self.report_lost_parent()
            else:
                self._report(_EVER, self._end_of(rank, "vanished", _GONE))

    def _outlast_others(self) -> None:
        """Wait for the end of the others of this host: without rank 0 each prints its last lines, above the report."""
        self.end_connections()  # they may wait for this rank
        # Not for that of rank 1, which reports the end of rank 0 too, and waits for this rank.
        others = [pid for rank, pid in self._others_here().items() if rank > 1]
        deadline = time.monotonic() + self.grace_period / 2
        while time.monotonic() < deadline and any(map(_runs, others)):
            time.sleep(_LOOK_EVERY)

    def _others_here(self) -> dict[int, int]:
        """Return the process ids of the other ranks of this host."""
        own, _ = self.channel.process_of(self.channel.rank)
        ranks = list(self.channel.processes.items())
        return {rank: pid for rank, (host, pid) in ranks if host == own and rank != self.channel.rank}

    # -- the error that this rank raises ----------------------------------------------------------------

    def _with_own_ending(self, error: BaseException, first: FailureRecord) -> BaseException:
        """Settle how this rank's own error is printed: by rank 0, or by this rank if rank 0 has not answered."""
        if leaves_in_order(error):
            return error  # by sys.exit(0): it is a failure for those that do not leave
        # An error of this package is one of all ranks: each keeps its own, and all end in good order.
        is_first, is_ours = first.rank == self.channel.rank, isinstance(error, LockstepError)
        self._keeps_own = is_first or is_ours or outcome.note is None
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
        if first.kind == "collective":
            # Destructors wait for peers, and to free the compiler that has read call sites takes seconds.
            outcome.force_exit_at_shutdown(record.exit_code, unless_caught=True)
            return error
        if is_ours:
            self.record = None  # they may still meet, as to save a checkpoint
            return error
        ending.deadline, ending.exit_code = self.grace_period + _CHILDREN_END, record.exit_code
        if is_first:
            # Of a SystemExit Python prints nothing, and nobody can see later whether the program has caught it.
            exits = isinstance(error, SystemExit)
            report = record.printed() if exits and self.prints_report and outcome.note is None else ""
            outcome.force_exit_at_shutdown(record.exit_code, report, unless_caught=not exits)
            if threading.current_thread() is not threading.main_thread() and hasattr(error, "add_note"):
                # Not in Python 3.10. Whoever runs this thread prints the error: Ray Train, on the driver.
                error.add_note(f"\n{headline}\n{saved}".rstrip())
        return error

    def _interrupted(self, error: BaseException) -> BaseException:
        """Ctrl-C reaches every rank of a terminal by itself: report it once, wait for nobody."""
        # A second one would end this report before the other ranks have it; later Lightning ignores it too.
        with on_ctrl_c(signal.SIG_IGN):
            first = self._keep(self._first_failure(error))
        self._keeps_own = first.kind == "interrupt"
        outcome.force_exit_at_shutdown(130)
        return error

    def _error_because_of(self, record: FailureRecord, error: BaseException | None = None) -> BaseException:
        """Return what this rank raises because of a record, if need be in place of ``error``."""
        if self._outlived:
            return RankFailedError(record.report(), record)
        if record.kind == "interrupt":
            return self._interrupted(KeyboardInterrupt())
        self._has_raised(record)
        if record.kind == "collective":
            return self._with_own_ending(
                error if isinstance(error, CollectiveError) else record.collective_error(), record
            )
        record = self._keep(record)
        stopped = RankFailedError(record.report(), record)
        outcome.force_exit_at_shutdown(record.exit_code)
        if self.prints_report and self._alone:
            self._outlast_others()
        text = record.printed() if self.prints_report else ""
        deadline = self.grace_period + _CHILDREN_END
        set_ending(stopped, Ending(text, record.exit_code, deadline, replaces=True))
        return stopped

    def describe(self, error: BaseException) -> FailureRecord:
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
        # Not if it is over with the attempt, or ends by its own error. A forked or spawned rank does not: Python calls
        # no excepthook there, so nothing would end it.
        if (
            self.record is record
            and self.state != "over"
            and not self._outlived
            and not outcome.failure_returned
            and not self._keeps_own
        ):
            self.end_now(record)

    def end_now(self, record: FailureRecord) -> NoReturn:
        """End this process by force because of a failure, from any thread; prints the report if this rank is to."""

        def report() -> str:  # a file system that hangs holds it for a while only
            kept = self._keep(record)
            return kept.printed() if self.prints_report and outcome.note is None else ""

        end_now(record.exit_code, report)


def propagation_on(channel: SideChannel) -> FailurePropagation:
    """Return the failure propagation of a side channel; the same one for as long as the channel lives."""
    return channel.get_or_create(FailurePropagation)
