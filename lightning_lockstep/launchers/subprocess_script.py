"""Ranks that run the same program again, watched by the first."""

from __future__ import annotations

import atexit
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_lockstep._lightning import _basic_subprocess_cmd, _SubprocessScriptLauncher
from lightning_lockstep._settings import LAUNCHER_PID, launcher_pid
from lightning_lockstep.distributed import FailurePropagation, shut_down
from lightning_lockstep.distributed.failure.process_exit import end_now, exit_plan
from lightning_lockstep.distributed.failure.record import describe_exit, keep_failure
from lightning_lockstep.distributed.process_group import (
    RankGroup,
    current_group,
    forget_rendezvous,
    host_rendezvous,
)
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.distributed.side_channel.opening import close_side_channel
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import LockstepEnvironment, check_has_device
from lightning_lockstep.launchers.hydra import hydra_child_command, program_file
from lightning_lockstep.launchers.rank_processes import RankProcesses, end_with_parent
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, current_job

# -- Starts the ranks of this node by running the same program again, and watches them --
# The first process of a node is a rank itself and the parent of the others. The variables that tell a rank
# who it is go into the children's environment only, so that the parent can start the ranks of a next job (a
# Hydra multirun does) as if there had been none before.

# How often the first process of a node looks for ranks that have ended [s].
_LOOK_EVERY = 0.1
# How long the report of a child that has exited may still take to arrive [s].
_REPORT_DELAY = 0.5
# Python exits with this code if all went well but it could not write out a standard stream at its end.
_NOT_FLUSHED = 120
_TOO_LATE = (
    "devices={}, but an earlier Trainer of this script has run on fewer ranks, or on ranks that were started another"
    " way: further ranks would run that Trainer again. Let the Trainer with the most ranks run first, put each into a"
    " script of its own, or let each start new ranks with strategy='lockstep_ddp_spawn'."
)


class _StartedRanks(RankProcesses):
    """The child ranks of one job of this process."""

    def __init__(self, job: object, first_rank: int = 0) -> None:
        super().__init__()
        self.job, self.first_rank = job, first_rank  # that of this process
        self.have_met = False  # True: each has been connected with this rank

    def first_failed(self) -> tuple[int, subprocess.Popen[bytes]] | None:
        """Return the rank that has failed by itself; one that was killed comes before others, which failed for it."""
        orderly = None, exit_plan.expected_exit_code, *((0, _NOT_FLUSHED) if self.have_met else ())
        failed = (
            (rank, process)
            for rank, process in self.processes.items()
            if not self.stopping and (process.poll() not in orderly or self._has_gone(rank))
        )
        return min(failed, key=lambda one: one[1].returncode >= 0, default=None)

    def _has_gone(self, local_rank: int) -> bool:
        """Return whether a child has ended in the middle of a fit without an error, as by `os._exit(0)`."""
        propagation = _propagation()
        if propagation is None or propagation.attempt.state != "running":
            return False
        has_ended = self.processes[local_rank].poll() is not None
        return has_ended and not propagation.channel.has_closed(self.first_rank + local_rank)


_started: _StartedRanks | None = None
# Of the Trainer that this process works for now, with ranks of its own or as one.
_works_for: RankSupervisor | None = None


def _propagation() -> FailurePropagation | None:
    return None if _works_for is None else _works_for.propagation


def connected_group() -> RankGroup | None:
    """Return the group by which this process is already connected in its job, or ``None``."""
    is_next_job = _started is not None and _started.job != current_job()
    return None if is_next_job else current_group()


def have_met(num_devices: int, num_nodes: int) -> None:
    """Note on how many devices and nodes a Trainer has connected the ranks."""
    group = current_group()
    if group is not None:
        group.layout = num_devices, num_nodes
    if _started is not None:
        _started.have_met = True


def check_ranks(supervisor: RankSupervisor, of: Any) -> None:  # of: a strategy, or its launcher
    """Refuse, on every rank, a Trainer that expects other ranks than were started or are connected."""
    try:
        check_has_device(of.cluster_environment, of.num_processes, of.num_nodes, connected_group())
    except LaunchError as error:
        supervisor.refuse(error)


def runs_without_children() -> None:
    """Note that this job has a Trainer whose ranks are not started by running the program again."""
    global _started
    job = current_job()
    if _started is None or _started.job != job:
        forget_earlier_job()
        _started = _StartedRanks(job)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs this program once more for every further rank of this node."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self._supervisor: RankSupervisor = strategy.supervisor

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether this works in a notebook: the program cannot be run again there, but ranks may exist already."""
        return bool(self.cluster_environment.creates_processes_externally)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the ranks of this node unless that has been done, then run ``function`` under the supervisor."""
        global _works_for
        check_ranks(self._supervisor, self)
        parent = launcher_pid()
        if not self.cluster_environment.creates_processes_externally:
            self._start_ranks()
        elif parent is not None and _works_for is None:
            end_with_parent(lambda: os.getppid() == parent, unless=_reports_lost_parent)
        _works_for = self._supervisor
        self._supervisor.attach(trainer)
        return self._supervisor.run(function, *args, **kwargs)

    def _start_ranks(self) -> None:
        global _started
        job = current_job()
        if _started is not None and _started.job == job:
            if self.num_processes != len(_started.processes) + 1:
                raise LaunchError(_TOO_LATE.format(self.num_processes))
            # The children, and the ranks of other nodes, run this same script and will reach this Trainer too.
            self.procs = list(_started.processes.values())
            return
        forget_earlier_job()
        self._check_can_spawn_children()
        first_rank = self.cluster_environment.node_rank() * self.num_processes
        ranks = _StartedRanks(job, first_rank)
        environ = self._rank_environment()
        if self.num_processes > 1:
            numbers = range(1, self.num_processes)
            ranks.start({one: {"LOCAL_RANK": str(one)} for one in numbers}, rank_command(), environ)
        _started, self.procs = ranks, list(ranks.processes.values())
        threading.Thread(target=self._watch, args=(ranks,), name="lockstep-watch", daemon=True).start()

    def _rank_environment(self) -> dict[str, str]:
        environment = self.cluster_environment
        environment.validate_settings(self.num_processes, self.num_nodes)
        unplaced = self.num_nodes == 1 and "MASTER_PORT" not in os.environ
        if unplaced and isinstance(environment, LockstepEnvironment):
            # Listening first and passing the port on afterwards leaves no gap in which another job takes it.
            environment.adopt_port(host_rendezvous(environment.main_address))
        # Of several nodes, started by hand, each would make another one.
        token = token_for_children() if self.num_nodes == 1 else {}
        return {
            **os.environ,
            **token,
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            LAUNCHER_PID: str(os.getpid()),
        }

    def _watch(self, ranks: _StartedRanks) -> None:
        is_last = False
        while not is_last and _started is ranks:
            # Before the question who has failed: one that ends after it is found by the next look.
            is_last = all(process.poll() is not None for process in ranks.processes.values())
            if ranks.first_failed():
                time.sleep(_REPORT_DELAY)
            if failed := ranks.first_failed():
                self._child_ended(ranks, *failed)
                return
            time.sleep(_LOOK_EVERY)

    def _child_ended(self, ranks: _StartedRanks, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        rank, propagation = ranks.first_rank + local_rank, _propagation()
        if propagation is not None:
            propagation.attempt.report_child_exit(rank, process.returncode, process.pid)
            return
        # The ranks have not met yet, so the main thread waits for a rank that will not come.
        ended = describe_exit(rank, self.num_processes * self.num_nodes, process.pid, process.returncode)
        hint = "" if process.returncode else " Every rank has to make the same Trainer and start it."
        ranks.kill()
        end_now(
            ended.exit_code,
            f"\nlightning-lockstep: rank {rank} (process {process.pid}) ended before all ranks had met:"
            f" {ended.summary}. What it printed is above. The other ranks were stopped.{hint}\n",
        )


def _reports_lost_parent() -> bool:
    """Note in a child that its parent has ended, which its connections tell later; return whether anybody listens."""
    propagation = _propagation()
    if propagation is not None:
        propagation.attempt.report_lost_parent()
    return propagation is not None


def forget_earlier_job() -> None:
    """End the ranks of an earlier job of this process and destroy its process group."""
    global _started
    if _started is None:
        return
    earlier, _started = _started, None
    shut_down(destroy_process_group=True)
    if _works_for is not None:
        earlier.wait(_works_for.settings.grace_period)
    earlier.kill()
    gc.collect()  # an engine of that job, in a cycle of references, would keep its group and the group's store
    forget_rendezvous()


def rank_command() -> tuple[list[str], str | None, dict[str, str]]:
    """Return (command, folder, environment variables) that runs this program again."""
    by_hydra = hydra_child_command()
    if by_hydra is not None:
        return by_hydra
    if getattr(sys.modules["__main__"], "__spec__", None) is None:
        program_file(str(Path.cwd()))
    return list(_basic_subprocess_cmd()), None, {}


@atexit.register
def _end_children() -> None:
    ranks, propagation = _started, _propagation()
    if ranks is None or _works_for is None:
        return
    if exit_plan.forced_exit or exit_plan.ends_with_error:  # the others may wait for this rank forever
        if propagation is not None:
            propagation.end_connections()
        close_side_channel(0.0)
        ranks.wait(_works_for.settings.grace_period)
        ranks.kill()
        return
    if propagation is not None:
        propagation.attempt.end_program()
    for process in ranks.processes.values():
        process.wait()
    if (failed := ranks.first_failed()) and propagation is not None:
        local_rank, process = failed
        record = propagation.attempt.report_child_exit(ranks.first_rank + local_rank, process.returncode, process.pid)
        end_now(record.exit_code, keep_failure(record).printed())
