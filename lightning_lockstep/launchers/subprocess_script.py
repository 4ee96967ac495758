"""Ranks that run the same program again, watched by the first; Ctrl-C on a terminal."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_lockstep._lightning import TrainerFn, _basic_subprocess_cmd, _SubprocessScriptLauncher
from lightning_lockstep._settings import LAUNCHER_PID, launcher_pid
from lightning_lockstep._text import ranks_in_words, say
from lightning_lockstep.distributed import alone, shut_down
from lightning_lockstep.distributed.failure.exit_notes import keep_failure
from lightning_lockstep.distributed.failure.process_exit import (
    at_exit,
    end_now,
    outcome,
)
from lightning_lockstep.distributed.failure.record import describe_exit
from lightning_lockstep.distributed.process_group import forget_rendezvous, host_rendezvous
from lightning_lockstep.distributed.rendezvous import token_for_children
from lightning_lockstep.distributed.side_channel.opening import known_rank
from lightning_lockstep.errors import LaunchError
from lightning_lockstep.launchers.environments import (
    AloneEnvironment,
    LockstepEnvironment,
    check_has_device,
)
from lightning_lockstep.launchers.rank_processes import SAY_AFTER, BadEnd, RankProcesses, end_with_parent
from lightning_lockstep.launchers.rank_supervisor import RankSupervisor, current_job

# -- Ctrl-C for a main thread that sits in a collective --
# Python runs signal handlers on the main thread, between two bytecodes, which a rank that waits in C++ for
# a peer never reaches. But the handler in C writes the signal's number to a wake-up descriptor, which a
# thread here reads.


def watch_interrupts(on_stuck: Callable[[], None], *, patience: float) -> Callable[[], None]:
    """Call ``on_stuck`` when Ctrl-C has not ended this process after ``patience`` [s]; returns what ends the watch."""
    # That is, when Python's handler was not reached, or was and the process is leaving because of a failure. A program
    # that handles the ``KeyboardInterrupt`` itself goes on.
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:  # another library uses it, so nothing is watched
        signal.set_wakeup_fd(before)
        return lambda: None
    ended, handled = threading.Event(), threading.Event()
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        handled.set()
        assert callable(usual)
        usual(number, frame)

    def run() -> None:  # holds both sockets: the signal handler knows the writer by its number only
        with suppress(OSError), reader, writer:
            while not ended.is_set() and (numbers := reader.recv(16)):
                if signal.SIGINT in numbers and not ended.wait(patience):
                    if outcome.forced_exit_pending or not handled.is_set():
                        on_stuck()
                        return
                    handled.clear()

    def end() -> None:
        ended.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) is note:
                signal.signal(signal.SIGINT, usual)
        writer.close()

    if callable(usual):
        signal.signal(signal.SIGINT, note)
    threading.Thread(target=run, name="lockstep-interrupt", daemon=True).start()
    return end


# -- Starts the ranks of this node by running the same program again, and watches them --
# The first process of a node is a rank itself and the parent of the others. The variables that tell a rank
# who it is go into the children's environment only, so that the parent can start the ranks of a next job (a
# Hydra multirun does) as if there had been none before.

# How often the parent looks for children that have ended [s].
_LOOK_EVERY = 0.1
# How long the report of a child that has exited may still take to arrive [s].
_REPORT_DELAY = 0.5
# Python's own exit code for a standard stream that it could not write out at its end, all else being well.
_NOT_FLUSHED = 120
_TOO_LATE = (
    "devices={}, but an earlier Trainer of this script has run on fewer ranks, or on ranks that were started another"
    " way: further ranks are started by running the script again, and would run that Trainer again. Let the Trainer"
    " with the most ranks run first, put each into a script of its own, or let each start new ranks with"
    " strategy='lockstep_ddp_spawn'."
)
_FIT_ALONE = (
    "Trainer.fit() with devices=1, but an earlier Trainer of this script, or the program that started it, has connected"
    " several ranks: expected validate, test or predict, which each rank runs alone. Fits would give each rank other"
    " weights. To train on all ranks, set devices to the number of ranks on each node. Train on one device in a script"
    " of its own, or let each Trainer start new ranks with strategy='lockstep_ddp_spawn'."
)
_DIVIDED = (
    "The parameters of this module are divided among the ranks, so one rank cannot run it alone: expected a module"
    " with whole parameters. Make a new one from a checkpoint, with load_from_checkpoint."
)


def _is_orderly(code: int) -> bool:
    return code in (0, _NOT_FLUSHED, outcome.expected_exit_code)


class _StartedRanks(RankProcesses):
    """The child ranks of one job of this process, and the supervisor of the Trainer that they work for now."""

    def __init__(self, job: object, supervisor: RankSupervisor) -> None:
        super().__init__(first=1, is_orderly=_is_orderly)
        self.job = job
        self.end_watch: Callable[[], None] = lambda: None
        self.work_for(supervisor)

    def work_for(self, supervisor: RankSupervisor) -> None:
        """Let a Trainer's supervisor learn when a child exits, and end the children before a forced end."""
        self.supervisor = supervisor
        supervisor.on_force = self.kill

    def end(self, patience: float) -> list[int]:
        """Wait for the children to exit by themselves, then kill those that are left; return their ranks here."""
        self.wait(patience)
        left = self.running()
        self.kill()
        return left


_started: _StartedRanks | None = None


def connected_rank() -> tuple[int, int] | None:
    """Return (rank, world size) by which this process is already connected in its job, or ``None``."""
    is_next_job = _started is not None and _started.job != current_job()
    return None if is_next_job else known_rank()


def runs_without_children(supervisor: RankSupervisor) -> None:
    """Note that a Trainer of this job runs without ranks that the program is run again for."""
    global _started
    job = current_job()
    if _started is None or _started.job != job:
        forget_earlier_job(supervisor.settings.grace_period)
        _started = _StartedRanks(job, supervisor)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs this program once more for every further rank of this node."""

    def __init__(
        self, supervisor: RankSupervisor, cluster_environment: Any, *, num_processes: int, num_nodes: int
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._supervisor = supervisor

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether this works in a notebook: the program cannot be run again there, but ranks may exist already."""
        return bool(self.cluster_environment.creates_processes_externally)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the ranks of this node unless that has been done, then run ``function`` under the supervisor."""
        if isinstance(self.cluster_environment, AloneEnvironment):
            return self._run_alone(function, *args, trainer=trainer, **kwargs)
        size = {"num_devices": self.num_processes, "num_nodes": self.num_nodes}
        try:
            check_has_device(self.cluster_environment, **size, connected=connected_rank())
        except LaunchError as error:
            self._supervisor.refuse(error)
        self.cluster_environment.validate_settings(**size)
        if not self.cluster_environment.creates_processes_externally:
            self._start_ranks()
        elif (parent := launcher_pid()) == os.getppid():  # else the variable is left over from another job
            supervisor = self._supervisor
            # Once the ranks have met, the side channel watches the others.
            end_with_parent(lambda: os.getppid() == parent, until=lambda: supervisor.propagation is not None)
        self._supervisor.attach(trainer)
        return self._supervisor.run(function, *args, **kwargs)

    def _run_alone(self, function: Callable[..., Any], *args: Any, trainer: Any, **kwargs: Any) -> Any:
        """Run ``function`` in a world of one, on each rank that comes here; nothing is sent."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._supervisor.refuse(LaunchError(_FIT_ALONE))
        parameters = trainer.lightning_module.parameters()
        if any(hasattr(one, "device_mesh") or hasattr(one, "ds_tensor") for one in parameters):
            self._supervisor.refuse(LaunchError(_DIVIDED))
        self._supervisor.attach(trainer)
        self._supervisor.join_connected()
        with alone():
            return self._supervisor.run(function, *args, **kwargs)

    def _start_ranks(self) -> None:
        global _started
        job = current_job()
        if _started is not None and _started.job == job:
            if self.num_processes not in (1, len(_started.processes) + 1):
                raise LaunchError(_TOO_LATE.format(self.num_processes))
            # The children, and the ranks of other nodes, run this same script and will reach this Trainer too.
            self.procs = _started.processes
            _started.work_for(self._supervisor)
            return
        forget_earlier_job(self._supervisor.settings.grace_period)
        self._check_can_spawn_children()
        environ = self._rank_environment()
        ranks = _StartedRanks(job, self._supervisor)
        ranks.start(lambda local_rank: self._start_rank(local_rank, environ), self.num_processes - 1)
        _started, self.procs = ranks, ranks.processes
        ranks.end_watch = watch_interrupts(self._interrupted, patience=self._supervisor.settings.grace_period)
        threading.Thread(target=self._watch, args=(ranks,), name="lockstep-watch", daemon=True).start()

    def _rank_environment(self) -> dict[str, str]:
        environment = self.cluster_environment
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

    def _start_rank(self, local_rank: int, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        command, folder = rank_command()
        return subprocess.Popen(command, env={**environ, "LOCAL_RANK": str(local_rank)}, cwd=folder)

    def _watch(self, ranks: _StartedRanks) -> None:
        while _started is ranks:
            ranks.look()
            if ranks.bad:
                time.sleep(_REPORT_DELAY)
                self._child_ended(ranks, ranks.bad[0])
                return
            if not ranks.running():
                return
            time.sleep(_LOOK_EVERY)

    def _child_ended(self, ranks: _StartedRanks, end: BadEnd) -> None:
        rank = self.cluster_environment.node_rank() * self.num_processes + end.rank
        propagation = ranks.supervisor.propagation
        if propagation is not None:
            propagation.report_child_exit(rank, end.returncode, end.pid)
            return
        # The ranks have not met yet, so the main thread waits for a rank that will not come.
        _, summary, code = describe_exit(end.returncode)
        ranks.kill()
        end_now(
            code,
            f"\nlightning-lockstep: rank {rank} (process {end.pid}) ended before all ranks had met:"
            f" {summary}. What it printed is above. The other ranks were stopped.\n",
        )

    def _interrupted(self) -> None:
        if _started is not None:
            _started.kill()
        end_now(130, "\nlightning-lockstep: interrupted; all ranks were stopped.\n")


def forget_earlier_job(patience: float) -> None:  # patience: for ranks that are still busy [s]
    """End the ranks of an earlier job of this process and destroy its process group."""
    global _started
    if _started is None:
        return
    earlier, _started = _started, None
    earlier.end_watch()
    shut_down(destroy_process_group=True)
    earlier.end(patience)
    gc.collect()  # an engine of that job, in a cycle of references, would keep its group and the group's store
    forget_rendezvous()


def rank_command() -> tuple[list[str], str | None]:
    """Return (command, folder) that runs this program again."""
    if "hydra.core.hydra_config" in sys.modules:
        from lightning_lockstep.launchers.hydra import hydra_child_command

        by_hydra = hydra_child_command()
        if by_hydra is not None:
            return by_hydra
    main, program = sys.modules["__main__"], sys.argv[0]
    if getattr(main, "__spec__", None) is None and not Path(program).is_file():
        given = {"-c": "python -c", "-": "standard input", "": "standard input"}.get(program, repr(program))
        raise LaunchError(
            f"The program is {given}, which is no file in {Path.cwd()}: ranks are started by running it again. Put"
            " it into a file, or fork the ranks from this process: strategy='lockstep_ddp_fork', or"
            " start_method='fork'."
        )
    return list(_basic_subprocess_cmd()), None


@at_exit
def _end_children() -> None:
    ranks = _started
    if ranks is None:
        return
    if outcome.forced_exit_pending or outcome.ends_with_error:  # the others may wait for this rank forever
        patience = ranks.supervisor.settings.grace_period
        if killed := ranks.end(patience):
            say(
                f"lightning-lockstep: killed {ranks_in_words(killed)} of this host, which did not end within"
                f" {patience:g} s."
            )
            outcome.printed_a_line()
            outcome.repeat_headline()
        return
    ranks.wait(SAY_AFTER)
    ranks.say_who_runs()
    ranks.wait()
    ranks.look()
    # An exit code may have been agreed on since it was seen.
    bad = [end for end in sorted(ranks.bad, key=lambda end: end.rank) if not _is_orderly(end.returncode)]
    if failed := {end.rank: describe_exit(end.returncode)[1] for end in bad}:
        propagation = ranks.supervisor.propagation
        # It came when this rank was at its end.
        if propagation is not None and propagation.record is not None:
            end_now(1, keep_failure(propagation.record).printed())
        who, codes = ranks_in_words(list(failed)), ", ".join(failed.values())
        end_now(1, f"\nlightning-lockstep: {who} of this host failed: {codes}.\n")
