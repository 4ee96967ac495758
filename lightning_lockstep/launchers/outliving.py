"""A run that outlives its ranks: the first process of each host, which is not a rank, and a rank's loop over attempts.

::

    first process of a host                    rank, or spare: a process that the first one has started
    starts the ranks of this host, and tells   meets the other members, connects, takes the state of the most
      the first host which ends                  advanced one, calls the function of the Trainer
    on the first host: hosts the store         a member is lost: its waits end, it drops the group, and begins
      a rank ends by a signal, or a host does    again with the members that are left; if it is a spare, it
      not answer: publishes who is left; with    takes the place of one
      spares has a process started for it, and a process that was started later has reached the Trainer: the
      publishes again when that is ready         same, with one member more
    ends as they end

Only the end of a process by a signal is outlived: an exception, or the program's own exit, ends all as in any run.
"""

from __future__ import annotations

import inspect
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_lockstep._lightning import _TunerExitException
from lightning_lockstep._settings import MEMBER
from lightning_lockstep._system import shell_exit_code
from lightning_lockstep._text import counted, say
from lightning_lockstep.distributed.failure.members import HostedMembers, Membership, current_membership
from lightning_lockstep.distributed.failure.process_exit import (
    ExitReport,
    end_now,
    exit_plan,
    flush_everything,
    set_exit_report,
)
from lightning_lockstep.distributed.failure.record import FailureRecord, describe_exit, keep_failure
from lightning_lockstep.distributed.process_group import (
    RankGroup,
    forget_rendezvous,
    process_group_exists,
    rendezvous_store,
)
from lightning_lockstep.distributed.side_channel.channel import Message, SideChannel
from lightning_lockstep.distributed.side_channel.opening import open_on, side_channel_if_open
from lightning_lockstep.errors import LaunchError, RankFailedError
from lightning_lockstep.launchers.rank_processes import ASKS_TO_END, RankProcesses, SignalForwarding
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, end_as_ranks_did, ran_elsewhere
from lightning_lockstep.launchers.subprocess_script import ScriptLauncher, rank_command

# How much longer than the grace period the ranks of a run that ends may take [s].
_ENDS_WITHIN = 20.0
# How often the first process looks who has come, or ended [s].
_LOOK_EVERY = 0.02
# How long a host may be silent [s]; the channel gives it two seconds more to connect again.
_HOST_SILENCE = 4.0
# Messages between the first processes of the hosts: a process has ended, the run has, a process is to be started.
_ENDED, _OVER, _START = "ended", "over", "start"


@dataclass(frozen=True)
class _Layout:
    """The processes of a run, numbered: first the ranks of each host in turn, then the spare ones."""

    hosts: int
    ranks: int  # of each host
    spares: int  # on each host

    def of_host(self, host: int) -> tuple[int, ...]:
        first_spare = self.hosts * self.ranks + host * self.spares
        of_ranks = range(host * self.ranks, (host + 1) * self.ranks)
        return (*of_ranks, *range(first_spare, first_spare + self.spares))

    def variables(self, number: int) -> dict[str, str]:
        """Return what tells a process which one it is."""
        is_rank = number < self.hosts * self.ranks
        # A spare has the last number: a device of that number exists, and Lightning does not take it for rank 0.
        local = number % self.ranks if is_rank else self.ranks - 1
        return {MEMBER: str(number), "LOCAL_RANK": str(local)}


class _HostProcesses(RankProcesses):
    """The ranks and spare processes of this host; the first process of the first host hears how they end."""

    def __init__(self, channel: SideChannel, layout: _Layout, environ: Mapping[str, str]) -> None:
        super().__init__()
        self._channel, self._layout = channel, layout
        self._command, self._environ = rank_command(), environ
        self._asked_for: queue.SimpleQueue[int] = queue.SimpleQueue()  # processes to start
        self._code: int | None = None  # the exit code of the run, once it has ended
        channel.on(_START, lambda message: self._asked_for.put(message.body))
        channel.on(_OVER, self._take_code)
        if channel.rank:
            channel.watch_peers(self._cut_off)

    def follow(self, run: _Run | None) -> int:
        """Report processes that end, pass on signals that ask this one to end, and return the exit code of the run."""
        with SignalForwarding(self.send, self.kill, asks=(*ASKS_TO_END, signal.SIGINT)) as signals:
            while self._code is None:
                is_stopping = self.stopping or signals.asked is not None
                self._report(is_stopping=is_stopping)
                while not self._asked_for.empty():
                    number = self._asked_for.get()
                    if not is_stopping:
                        self.start_members([number])
                time.sleep(_LOOK_EVERY)
                if run is not None:
                    self._code = run.look()
        self.kill()  # spare processes, and ranks whose time is over
        return shell_exit_code(-signal.SIGINT) if signals.asked == signal.SIGINT else self._code

    def start_members(self, numbers: Iterable[int]) -> None:
        # Signals of a terminal reach the ranks from this process alone.
        variables = {number: self._layout.variables(number) for number in numbers}
        self.start(variables, self._command, self._environ, start_new_session=True)

    def _report(self, *, is_stopping: bool) -> None:
        for number in [one for one, process in self.processes.items() if process.poll() is not None]:
            process = self.processes.pop(number)
            code = process.returncode
            if code < 0 and is_stopping:  # what was asked to end is not lost
                code = shell_exit_code(code)
            self._channel.post(_ENDED, [number, process.pid, code], to=0)

    def _take_code(self, message: Message) -> None:
        self._code = int(message.body)

    def _cut_off(self, _: int) -> None:
        end_now(
            1,
            f"\nlightning-lockstep: host {socket.gethostname()} has lost the first host of the run (the network is cut,"
            " or the process there that started the run was killed): its ranks are stopped.\n",
        )


class _Run:
    """Who is left of a run; the first process of the first host publishes it."""

    def __init__(
        self, hosted: HostedMembers, channel: SideChannel, layout: _Layout, least: int, grace_period: float
    ) -> None:
        self._hosted, self._channel, self._least = hosted, channel, least
        self._ends: queue.SimpleQueue[tuple[int, int, int | None]] = queue.SimpleQueue()
        ranks = range(layout.hosts * layout.ranks)
        self._host_of = {number: host for host in range(layout.hosts) for number in layout.of_host(host)}
        # Each is replaced once: what was started in place of another may be lost for the same reason.
        self._replaceable = set(self._host_of) if layout.spares else set[int]()
        self._left = set(self._host_of)
        self._spares = [number for number in self._host_of if number not in ranks]
        self._newcomers: list[int] = []  # that have not reached the Trainer yet
        # A rank is named by its number at the start, another process by that of the rank whose place it takes.
        self._names = {rank: rank for rank in ranks}
        self._world_size = len(ranks)
        self._lost: list[FailureRecord] = []
        # Of the last generation that has met: rank 0, and how many were lost before.
        self._main = self._lost_before = 0
        self._code = 0  # the exit code of the run
        self._patience = grace_period + _ENDS_WITHIN
        self._deadline: float | None = None  # of a run that is ending
        hosted.publish(ranks)
        channel.on(_ENDED, lambda message: self._ends.put(message.body))
        channel.watch_peers(self._host_ends)

    def _host_ends(self, host: int) -> None:
        for number in [one for one, its_host in self._host_of.items() if its_host == host]:
            self._ends.put((number, 0, None))

    def look(self) -> int | None:
        """Publish who is left if processes ended; once the run is over return the exit code and tell other hosts."""
        lost = self._take_ends()
        self._take_newcomers()
        request, has_met = self._hosted.request(), self._hosted.has_met()
        if has_met:
            self._hosted.free_first_call()
        are_fewer = len(self._hosted.current.members) < self._world_size
        if lost or request is not None or (self._spares and are_fewer and has_met and not self._code):
            self._publish(lost, request or "")
        is_late = self._deadline is not None and time.monotonic() >= self._deadline
        if not is_late and not self._left.isdisjoint(self._hosted.current.members):
            return None
        self._say_what_was_lost()
        self._channel.post(_OVER, self._code)
        return self._code

    def _take_ends(self) -> list[FailureRecord]:
        """Take the processes that have ended since the last look; return those that are lost."""
        lost = []
        while not self._ends.empty():
            number, pid, code = self._ends.get()
            if number not in self._left:  # its host was lost before
                continue
            self._left.discard(number)
            if number in (*self._spares, *self._newcomers):
                self._spares = [one for one in self._spares if one != number]
                if code:
                    why = describe_exit(number, self._world_size, pid, code).summary
                    say(f"lightning-lockstep: a process that was to take a place has ended ({why}); the ranks go on.")
            elif (code is None or code < 0) and self._deadline is None:
                lost.append(self._describe(number, pid, code))
                if code and number in self._replaceable:
                    self._replace(self._host_of[number])
            elif code:
                self._end(shell_exit_code(code))
        return lost

    def _take_newcomers(self) -> None:
        """Let those that have reached the Trainer be spare processes."""
        self._newcomers = [one for one in self._newcomers if one in self._left]
        for number in filter(self._hosted.has_reached_trainer, list(self._newcomers)):
            self._newcomers.remove(number)
            self._spares.append(number)

    def _replace(self, host: int) -> None:
        """Have a process started, on the host of one that was lost."""
        number = len(self._host_of)
        self._host_of[number] = host
        self._left.add(number)
        self._newcomers.append(number)
        self._channel.post(_START, number, to=host)

    def _describe(self, number: int, pid: int, code: int | None) -> FailureRecord:
        host = self._host_of[number]
        record = describe_exit(self._names[number], self._world_size, pid, code or -signal.SIGKILL)
        record = replace(record, host=self._channel.process_of(host)[0] if host else record.host)
        why = "its host is cut off, or the process that started it was killed"
        return record if code else replace(record, kind="vanished", summary=why)

    def _publish(self, lost: list[FailureRecord], why_it_ends: str) -> None:
        """Let those that are left go on, or end because of the member that was lost last."""
        if self._hosted.has_met():
            self._main = self._names[self._hosted.current.members[0]]
            self._lost_before = len(self._lost)
        self._lost += lost
        left = [member for member in self._hosted.current.members if member in self._left]
        # Spares can join in the script's first call of a Trainer alone, and if a member is left to give them its state.
        if self._spares and not (left and self._hosted.hold_first_call()):
            self._spares = []
        named = [self._names[member] for member in left]
        free = [rank for rank in range(self._world_size) if rank not in named]
        taking, self._spares = self._spares[: len(free)], self._spares[len(free) :]
        self._names.update(zip(taking, free, strict=False))
        left += taking
        if self._lost and len(left) < self._least:
            why_it_ends = f"{counted(len(left), 'rank')} left, and least_ranks={self._least}"
        if why_it_ends:
            last = self._lost.pop()
            lost = [replace(last, summary=f"{last.summary}; {why_it_ends}")]
            self._lost += lost
            self._end(last.exit_code)
        self._hosted.publish(left, lost, ends=bool(why_it_ends))

    def _say_what_was_lost(self) -> None:
        """Say what was lost, unless a failure was reported."""
        for event in () if self._code else self._hosted.reported_losses():
            say(f"lightning-lockstep: {event['text']}.")
        if self._lost and not self._hosted.current.members:  # nobody is left to say it
            say(self._lost[-1].printed())
        main = next((one for one in self._lost[self._lost_before :] if one.rank == self._main), None)
        if main is not None and not self._code and not self._hosted.has_met():
            self._code = main.exit_code
            say(
                f"lightning-lockstep: rank 0 (process {main.pid}) was {main.summary} after the last call of a Trainer:"
                " what the program does there was not repeated."
            )

    def _end(self, code: int) -> None:
        """Expect all processes to end, with the code of the first that has."""
        self._code = self._code or code
        self._deadline = self._deadline or time.monotonic() + self._patience


class OutlivingLauncher(ScriptLauncher):
    """Runs this program once more for every rank, and lets a rank go on without those that are lost."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._strategy = strategy

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """In the first process start the ranks and end as they do; in a rank call ``function``, again if need be."""
        membership = current_membership()
        if membership is not None:
            self._supervisor.attach(trainer)
            recovery = self._strategy.startup.recovery(self._strategy, membership, trainer)
            call = inspect.signature(function).bind(*args, **kwargs)
            return self._run_as_member(membership, recovery, function, call)
        self._strategy.startup.check_call(trainer)
        if ran_elsewhere():
            return None
        flush_everything()  # what this process has printed comes first
        code = self._run_ranks()
        if self.num_nodes == 1:  # else the hosts have their configuration from this store
            forget_rendezvous()
        exit_plan.on_force = None
        end_as_ranks_did(code)
        return None

    def _run_as_member(self, membership: Membership, recovery: Any, function: Any, call: Any) -> Any:
        """Call ``function`` until all members that are left have reached its end. Ranks: all members."""
        supervisor = self._supervisor
        membership.propagation = lambda: supervisor.propagation

        def call_to_its_end() -> Any:
            answer = function(*call.args, **call.kwargs)
            membership.finish_call()  # in the attempt: a rank that has reached it hears of a failure of another one
            return answer

        while True:
            begins = membership.outdated or not process_group_exists()
            try:
                if begins:
                    recovery.leave()
                    if (channel := side_channel_if_open()) is not None:
                        channel.lingers = False  # nobody waits for what was posted last
                    supervisor.forget_group()
                    supervisor.in_batches = False
                    with membership:
                        recovery.strategy.setup_environment()
                        recovery.share_state(call)
                answer = supervisor.attempt(call_to_its_end)
                recovery.end_call()
                return answer
            except BaseException as error:
                if isinstance(error, _TunerExitException) or not membership.ends_attempt(error):
                    supervisor.raise_for(error)
                if membership.newest.ends:
                    raise _end_of_run(membership, supervisor) from None
                # The channel may have reported the loss before the first process did.
                exit_plan.cancel_forced_exit()
                # The frames hold what holds the group, such as DDP's reducer.
                traceback.clear_frames(error.__traceback__)
                error.__traceback__ = error.__context__ = None

    def _run_ranks(self) -> int:
        """Start the ranks of this host, follow them to the end of the run, and return its exit code."""
        environ, settings = self._rank_environment(), self._strategy.settings
        host, limit = int(environ["NODE_RANK"]), settings.duration.total_seconds()
        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        store = rendezvous_store(host, self.num_nodes, address=address, port=port, timeout=limit)
        channel, hosted = SideChannel(), HostedMembers(store)
        if hosted.has_begun():
            raise LaunchError(
                "A further job of this program on several hosts, with on_lost_rank='continue': expected one job, so"
                " that each of a sweep has a program of its own, as with hydra/launcher=submitit_slurm."
            )
        if self.num_nodes > 1:
            silence = min(_HOST_SILENCE, settings.silence_limit)
            channel = open_on(RankGroup(host, self.num_nodes, store, options=(limit, silence)))
            self._wait_for_hosts(channel, limit)
        layout = _Layout(self.num_nodes, self.num_processes, settings.spares)
        processes = _HostProcesses(channel, layout, environ)
        processes.start_members(layout.of_host(host))
        least, grace_period = settings.least_ranks, settings.grace_period
        run = _Run(hosted, channel, layout, least, grace_period) if host == 0 else None
        code = processes.follow(run)
        channel.close()
        return code

    def _wait_for_hosts(self, channel: SideChannel, limit: float) -> None:
        deadline = time.monotonic() + limit
        others = range(1, self.num_nodes) if channel.rank == 0 else ()
        gone: list[int] = []
        channel.watch_peers(gone.append)
        while missing := [host for host in others if not channel.answers(host)]:
            if gone:
                raise LaunchError(
                    f"Host {channel.process_of(gone[0])[0]} was lost before all {self.num_nodes} hosts (num_nodes) had"
                    " come: what was printed there says why. Start this program on all of them again."
                )
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Of {self.num_nodes} hosts (num_nodes) {missing} did not come within {limit:.0f} s (timeout):"
                    " start this program once on each, with the same MASTER_ADDR and MASTER_PORT and a NODE_RANK of its"
                    " own, or let `srun --ntasks-per-node=1` do so."
                )
            time.sleep(_LOOK_EVERY)


def _end_of_run(membership: Membership, supervisor: RankSupervisor) -> RankFailedError:
    """Return what each rank raises if the run ends because of a lost member, which all of them know."""
    error = membership.error()
    record = error.record
    assert isinstance(record, FailureRecord)
    is_first = membership.newest.members[:1] == (membership.me,)
    text = keep_failure(record.in_folder(supervisor.folder())).printed() if is_first else ""
    exit_plan.force_exit_at_shutdown(record.exit_code)
    set_exit_report(error, ExitReport(text, record.exit_code, replaces=True))
    return error
