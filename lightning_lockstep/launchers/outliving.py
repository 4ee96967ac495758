"""A run that outlives its ranks: the first process, which is none, and the loop of each rank over its attempts.

::

    first process                              rank, a process that the first one has started
    starts the ranks, hosts their store        meets the other members, connects, takes the state of the most
    a process ends by a signal: publishes        advanced one, calls the function of the Trainer
      which members are left                   a member is lost: its waits end, it drops the group, and begins
    ends as they end                             again with the members that are left

Only the end of a process by a signal is outlived. An exception, or an exit by the program's own will, ends all ranks as
in any other run.
"""

from __future__ import annotations

import inspect
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_lockstep._lightning import _TunerExitException
from lightning_lockstep._settings import MEMBER
from lightning_lockstep._text import counted, say
from lightning_lockstep.distributed.failure.exit_notes import keep_failure
from lightning_lockstep.distributed.failure.members import HostedMembers, Membership, current_membership
from lightning_lockstep.distributed.failure.process_exit import (
    Ending,
    end_now,
    flush_everything,
    outcome,
    set_ending,
)
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_exit
from lightning_lockstep.distributed.process_group import (
    forget_rendezvous,
    process_group_exists,
    rendezvous_store,
)
from lightning_lockstep.distributed.side_channel.opening import side_channel_if_open
from lightning_lockstep.errors import RankFailedError
from lightning_lockstep.launchers.rank_processes import ASKS_TO_END, RankProcesses, SignalForwarding
from lightning_lockstep.launchers.rank_supervisor import (
    RankSupervisor,
    current_job,
    note_ran_elsewhere,
    ran_elsewhere,
)
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher, rank_command

# How much longer than the grace period the ranks of a run that ends may take [s].
_ENDS_WITHIN = 20.0


class _Members(RankProcesses):
    """The processes that are the ranks of a run, and who is left of them."""

    look_every = 0.02

    def __init__(self, hosted: HostedMembers, ranks: int, least: int, grace_period: float) -> None:
        super().__init__()
        self.code = 0  # with which the run ends
        self._hosted, self._ranks, self._least = hosted, ranks, least
        self._lost: list[FailureRecord] = []
        # Of the last generation that has met: rank 0, and how many were lost before.
        self._main = self._answered = 0
        self._patience, self._deadline = grace_period + _ENDS_WITHIN, float("inf")  # of a run that ends

    def follow(self) -> None:
        """Publish who is left until all have ended; signals that would end this process go to them."""
        self._hosted.publish(self.processes)
        with SignalForwarding(self.send, self.kill, asks=(*ASKS_TO_END, signal.SIGINT)) as signals:
            for _ in self.looks():
                self._look(is_stopping=signals.asked is not None)
            if signals.asked == signal.SIGINT:
                self.code = 128 + signal.SIGINT

    def _look(self, *, is_stopping: bool) -> None:
        lost = []
        for member in [one for one, process in self.processes.items() if process.poll() is not None]:
            process = self.processes.pop(member)
            code = process.returncode
            if code < 0 and not is_stopping and self._deadline == float("inf"):
                # A rank is named by its number at the start.
                lost.append(describe_exit(member, self._ranks, process.pid, code))
            elif code:
                self._end(code if code > 0 else 128 - code)
        asked = self._hosted.asked()
        if lost or asked is not None:
            self._publish(lost, asked or "")
        if time.monotonic() > self._deadline:
            self.kill()

    def _publish(self, lost: list[FailureRecord], why_it_ends: str) -> None:
        """Let those that are left go on, or end because of the member that was lost last."""
        if self._hosted.has_met():
            self._main, self._answered = self._hosted.current.members[0], len(self._lost)
        self._lost += lost
        left = [member for member in self._hosted.current.members if member in self.processes]
        if self._lost and len(left) < self._least:
            why_it_ends = f"{counted(len(left), 'rank')} left, and least_ranks={self._least}"
        if why_it_ends:
            last = self._lost.pop()
            lost = [replace(last, summary=f"{last.summary}; {why_it_ends}")]
            self._lost += lost
            self._end(last.exit_code)
        self._hosted.publish(left, lost, ends=bool(why_it_ends))

    def report(self) -> None:
        """Say at the end what was lost, unless a failure was reported."""
        for event in () if self.code else self._hosted.told():
            say(f"lightning-lockstep: {event['text']}.")
        if not self._hosted.current.members:  # nobody is left to say it
            say(self._lost[-1].printed())
        main = next((one for one in self._lost[self._answered :] if one.rank == self._main), None)
        if main is not None and not self.code and not self._hosted.has_met():
            self.code = main.exit_code
            say(
                f"lightning-lockstep: rank 0 (process {main.pid}) was {main.summary} after the last call of a Trainer:"
                " what the program does then was not made again."
            )

    def _end(self, code: int) -> None:
        """Expect all processes to end, with the code of the first that has."""
        self.code = self.code or code
        self._deadline = min(self._deadline, time.monotonic() + self._patience)

    def kill(self) -> None:
        """End all processes that still run, at once."""
        self._end(1)
        super().kill()


class OutlivingLauncher(ScriptLauncher):
    """Runs this program once more for every rank, and lets a rank go on without those that are lost."""

    def __init__(self, strategy: Any, least_ranks: int) -> None:
        given = {"num_processes": strategy.num_processes, "num_nodes": 1}
        super().__init__(strategy.supervisor, strategy.cluster_environment, **given)
        self._strategy, self._least = strategy, least_ranks

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """In the first process start the ranks and end as they do; in a rank call ``function``, again if need be."""
        membership = current_membership()
        if membership is not None:
            self._supervisor.attach(trainer)
            recovery = self._strategy.startup.recovery(self._strategy, membership, trainer)
            call = inspect.signature(function).bind(*args, **kwargs)
            return run_with_members(recovery, self._supervisor, membership, function, call)
        self._strategy.startup.check_call(trainer)
        if ran_elsewhere():
            return None
        flush_everything()  # what this process has printed comes first
        environ = {**self._rank_environment(), MEMBER: "1"}
        place = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        hosted = HostedMembers(rendezvous_store(0, 1, address=place[0], port=place[1]))
        members = _Members(hosted, self.num_processes, self._least, self._supervisor.settings.grace_period)
        # Signals of a terminal reach the ranks from here alone.
        members.start(range(self.num_processes), rank_command(), environ, start_new_session=True)
        members.follow()
        members.report()
        forget_rendezvous()
        outcome.on_force = None
        if current_job() is None or members.code:
            end_now(members.code, by_force=False)
        note_ran_elsewhere()
        return None


def run_with_members(
    recovery: Any,  # of strategies/outliving.py
    supervisor: RankSupervisor,
    membership: Membership,
    function: Callable[..., Any],
    call: inspect.BoundArguments,
) -> Any:
    """Call ``function`` until all members that are left have come to its end. Ranks: all members."""
    membership.propagation = lambda: supervisor.propagation

    def call_to_its_end() -> Any:
        answer = function(*call.args, **call.kwargs)
        membership.finish_call()  # in the attempt: a rank that has come to it hears of a failure of another one
        return answer

    while True:
        begins = membership.outdated or not process_group_exists()
        try:
            if begins:
                recovery.leave()
                if (channel := side_channel_if_open()) is not None:
                    channel.lingers = False  # nobody waits for what was posted last
                supervisor.forget_group()
                with membership:  # in which all that are left connect
                    recovery.strategy.setup_environment()
                    recovery.share_state(call)
            answer = supervisor.attempt(call_to_its_end)
            recovery.end_call()
            return answer
        except _TunerExitException:
            raise
        except BaseException as error:
            is_of_loss = membership.ends_attempt(error)
            if is_of_loss and membership.newest.ends:
                raise _end_of_run(membership, supervisor) from None
            if not is_of_loss:
                raised = supervisor.error_to_raise(error)
                if raised is error:
                    raise
                raise raised from None
            # The channel may have reported the loss before the first process did.
            outcome.cancel_forced_exit()
            # The frames hold what holds the group, such as DDP's reducer.
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = error.__context__ = None


def _end_of_run(membership: Membership, supervisor: RankSupervisor) -> RankFailedError:
    """Return what each rank raises if the run ends because of a lost member, which all of them know."""
    error, is_first = membership.error(), membership.newest.members[:1] == (membership.me,)
    record = error.record
    assert isinstance(record, FailureRecord)
    text = keep_failure(record.in_folder(supervisor.folder())).printed() if is_first else ""
    outcome.force_exit_at_shutdown(record.exit_code)
    set_ending(error, Ending(text, record.exit_code, replaces=True))
    return error
