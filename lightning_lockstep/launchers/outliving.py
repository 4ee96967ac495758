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
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import psutil

from lightning_lockstep._lightning import _TunerExitException
from lightning_lockstep._settings import LAUNCHER_PID, MEMBER, launcher_pid
from lightning_lockstep._text import counted, say
from lightning_lockstep.distributed.failure.exit_notes import keep_failure
from lightning_lockstep.distributed.failure.members import Generation, HostedMembers, Membership
from lightning_lockstep.distributed.failure.process_exit import (
    Ending,
    clock,
    end_now,
    flush_everything,
    outcome,
    set_ending,
)
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_exit, is_broken_collective
from lightning_lockstep.distributed.process_group import forget_rendezvous, process_group_exists
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.distributed.side_channel.opening import side_channel_if_open
from lightning_lockstep.errors import LockstepError, RankFailedError
from lightning_lockstep.launchers.rank_processes import SignalForwarding
from lightning_lockstep.launchers.rank_supervisor import (
    RankSupervisor,
    current_job,
    note_ran_elsewhere,
    ran_elsewhere,
)
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher, rank_command

# How often the first process looks for ranks that have ended [s].
_LOOK_EVERY = 0.02
# How long a rank whose collective has broken waits for the news that a member is lost [s].
_NEWS_WITHIN = 5.0
# How much longer than the grace period the ranks of a run that ends may take [s].
_ENDS_WITHIN = 20.0


# -- The first process --


class _Members:
    """The processes that are the ranks of a run."""

    def __init__(self, ranks: int, least: int, grace_period: float) -> None:
        self.store, self.processes = HostedMembers(), dict[int, subprocess.Popen[bytes]]()
        self.code = 0  # with which the run ends
        self._ranks, self._least, self._interrupted = ranks, least, False
        self._main_lost: FailureRecord | None = None  # rank 0 of the generation before
        self._patience, self._deadline = grace_period + _ENDS_WITHIN, float("inf")  # of a run that ends
        outcome.on_force = self.kill

    def start(self) -> None:
        """Start the processes, all as members of the first generation."""
        command, folder, variables = rank_command()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "NODE_RANK": "0"}
        shared = {**os.environ, **token_for_children(), **variables, **place, LAUNCHER_PID: str(os.getpid())}
        for member in range(self._ranks):
            own = {"WORLD_SIZE": str(self._ranks), "LOCAL_RANK": str(member), MEMBER: str(member)}
            # Signals of a terminal reach the ranks from here alone.
            self.processes[member] = subprocess.Popen(
                command, env={**shared, **own}, cwd=folder, start_new_session=True
            )
        self.store.publish(range(self._ranks))

    def wait(self, stopping: Callable[[], bool]) -> bool:
        """Reap the processes until all have ended, which is returned, or Ctrl-C is pressed; publish who is left."""
        try:
            while self.processes:
                self._reap(is_stopping=stopping() or self._interrupted)
                time.sleep(_LOOK_EVERY)
        except KeyboardInterrupt:
            self.kill() if self._interrupted else self.send(signal.SIGINT)
            self._interrupted, self.code = True, 128 + signal.SIGINT
        return not self.processes

    def _reap(self, *, is_stopping: bool) -> None:
        lost = {}
        for member, process in list(self.processes.items()):
            if (code := process.poll()) is None:
                continue
            del self.processes[member]
            if code < 0 and not is_stopping and self._deadline == float("inf"):
                # A rank is named by its number at the start.
                lost[member] = describe_exit(member, self._ranks, process.pid, code)
            elif code:
                self._end(code if code > 0 else 128 - code)
        if lost:
            self._publish(list(lost.values()))
        elif self.store.could_not_connect():
            self.store.publish(self.store.current.members)
        if time.monotonic() > self._deadline:
            self.kill()

    def _publish(self, lost: list[FailureRecord]) -> None:
        left = [member for member in self.store.current.members if member in self.processes]
        if self._main_lost is None or self.store.has_met():
            main = self.store.current.members[0]
            self._main_lost = next((one for one in lost if one.rank == main), None)
        is_enough = len(left) >= self._least
        if not is_enough:
            why = f"{lost[-1].summary}; {counted(len(left), 'rank')} left, and least_ranks={self._least}"
            lost[-1] = replace(lost[-1], summary=why)
            self._end(lost[-1].exit_code)
        self.store.publish(left, lost, ends=not is_enough)

    def report(self) -> None:
        """Say at the end what was lost, unless a failure was reported."""
        for event in () if self.code else self.store.history():
            say(f"lightning-lockstep: {event['text']}.")
        if self._main_lost is not None and not self.code and not self.store.has_met():
            self.code = self._main_lost.exit_code
            say(
                f"lightning-lockstep: rank 0 (process {self._main_lost.pid}) was {self._main_lost.summary} after the"
                " last call of a Trainer: what the program does then was not made again."
            )

    def _end(self, code: int) -> None:
        """Expect all processes to end, with the code of the first that has."""
        self.code = self.code or code
        self._deadline = min(self._deadline, time.monotonic() + self._patience)

    def send(self, number: int) -> None:
        """Send a signal to all processes."""
        for process in self.processes.values():
            process.send_signal(number)

    def kill(self) -> None:
        """End all processes that still run, at once."""
        self._end(1)
        for process in self.processes.values():
            process.kill()


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
            call = inspect.signature(function).bind(*args, **kwargs)
            return run_with_members(
                self._strategy.recovery_of(trainer, membership), membership, function, call
            )
        self._strategy.check_can_outlive(trainer)
        if ran_elsewhere():
            return None
        flush_everything()  # what this process has printed comes first
        members = _Members(self.num_processes, self._least, self._supervisor.settings.grace_period)
        members.start()
        with SignalForwarding(members.send, members.kill) as signals:
            while not members.wait(lambda: signals.asked is not None):
                pass
        members.report()
        forget_rendezvous()
        outcome.on_force = None
        if current_job() is None or members.code:
            end_now(members.code, by_force=False)
        note_ran_elsewhere()
        return None


# -- A rank --


class Recovers(Protocol):
    """What a strategy does for a call of a Trainer that is to outlive ranks. Ranks: all members, together."""

    supervisor: RankSupervisor

    def connect(self) -> None:
        """Connect with the members of the present generation."""

    def share_state(self, call: inspect.BoundArguments) -> None:
        """Make all members go on where the most advanced one is."""

    def leave(self) -> None:
        """Let go of what holds the process group, after an error. Ranks: any, alone."""

    def end_call(self) -> None:
        """Note the end of the call."""


_membership: Membership | None = None


def current_membership() -> Membership | None:
    """Return what this process knows of the members of its run, if it was started as one."""
    global _membership
    parent = launcher_pid()
    # Of a process that still runs and is not the parent, the variables are left over from another job.
    is_member = MEMBER in os.environ and parent and (parent == os.getppid() or not psutil.pid_exists(parent))
    if _membership is None and is_member:
        _membership = Membership(int(os.environ[MEMBER]), int(os.environ["MASTER_PORT"]))
    return _membership


def run_with_members(
    recovery: Recovers, membership: Membership, function: Callable[..., Any], call: inspect.BoundArguments
) -> Any:
    """Call ``function`` until all members that are left have come to its end. Ranks: all members."""
    membership.begin_call()
    membership.on_news = partial(_end_attempt, recovery.supervisor, membership)
    while True:
        try:
            is_done, answer = _try_with_members(recovery, membership, function, call)
        except RankFailedError:
            if not membership.goes_on:
                raise
            is_done = False  # the news has interrupted what deals with an error
        if is_done:
            recovery.end_call()
            return answer


def _try_with_members(
    recovery: Recovers, membership: Membership, function: Callable[..., Any], call: inspect.BoundArguments
) -> tuple[bool, Any]:
    """Return whether all members have come to the end of a function, and what it has returned here."""
    supervisor = recovery.supervisor

    def checked() -> Any:
        membership.check()  # what came before this attempt was entered does not end it
        return function(*call.args, **call.kwargs)

    try:
        if membership.outdated or not process_group_exists():
            recovery.leave()
            if (channel := side_channel_if_open()) is not None:
                channel.lingers = False
            supervisor.forget_group()
            membership.meet()
            recovery.connect()
            recovery.share_state(call)
        membership.has_met()
        answer = supervisor.attempt(checked)
        membership.finish_call()
    except _TunerExitException:
        raise
    except BaseException as error:
        if not _is_outlived(error, supervisor, membership):
            raised = _last_error(error, supervisor, membership)
            if raised is error:
                raise
            raise raised from None
        # The frames hold what holds the group, such as DDP's reducer.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = None
        return False, None
    return True, answer


def _end_attempt(supervisor: RankSupervisor, membership: Membership, generation: Generation) -> None:
    """End the attempt of this rank, or the whole run, because of a new generation; on another thread."""
    propagation = supervisor.propagation
    if propagation is None or not generation.lost:
        return
    if generation.ends:
        propagation.end_run(generation.lost[-1])
    elif not membership.connecting:
        propagation.end_attempt(generation.lost[-1])
        # A rank may wait for a lost one in a way of the program's own.
        clock.after(supervisor.settings.grace_period, membership.interrupt)


def _is_outlived(error: BaseException, supervisor: RankSupervisor, membership: Membership) -> bool:
    """Return whether an error is there because a member is lost, which the others outlive."""
    record = None if supervisor.propagation is None else supervisor.propagation.record
    # Not Ctrl-C, nor the program's own wish to end, nor an exception of a rank, which would come again.
    if membership.over or not isinstance(error, Exception) or (record is not None and not record.ended):
        return False
    may_be = membership.connecting or isinstance(error, LockstepError) or is_broken_collective(error)
    if not membership.wait_for_news(_NEWS_WITHIN if may_be else 0.0) and membership.connecting:
        membership.could_not_connect()
        membership.wait_for_news(_NEWS_WITHIN)
    return membership.goes_on


def _last_error(error: BaseException, supervisor: RankSupervisor, membership: Membership) -> BaseException:
    """Return what a rank raises that ends with its run."""
    record = error.record if isinstance(error, RankFailedError) else None
    if supervisor.propagation is not None or not isinstance(record, FailureRecord):
        return supervisor.error_to_raise(error)
    # Between two attempts, and for one rank alone, there is no protocol of failures; each rank knows the same.
    newest = membership.newest
    is_first = newest is not None and newest.members[:1] == (membership.me,)
    text = keep_failure(record.in_folder(supervisor.folder())).printed() if is_first else ""
    outcome.force_exit_at_shutdown(record.exit_code)
    set_ending(error, Ending(text, record.exit_code, replaces=True))
    return error
