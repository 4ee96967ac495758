"""What must come of a run, decided from its plan alone; the pages in docs/ promise it.

Each fault has one row: the error of the rank it happens to, the exit code of the job, and the last line printed. What
differs by the way the ranks are started, or by the callbacks, stands below the table.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Mapping

from benchmarks.soak.plan import MULTIPROCESSING, OF_USER, WITH_MPI, Plan

__all__ = ["Expected", "expect", "known"]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What must come of a run."""

    # exit codes of the process that the user starts, any of which is right; negative: of a signal
    codes: tuple[int, ...]
    # by rank (or ``parent``), the types of errors that may end its program; "": none, it was ended
    raised: Mapping[str, tuple[str, ...]]
    done: frozenset[str] = frozenset()  # the ranks (or ``parent``) that come to the end of the program
    printed: tuple[str, ...] = ()  # patterns that the output has
    report: str = ""  # how the line begins that names the error
    times: int = 0  # how often at most such a line is printed; at least once. 0: it does not matter
    last: str = ""  # pattern of the last line on stderr, or ""
    silent: bool = False  # whether no traceback may be printed
    checkpoint: str = r"step=4\.ckpt"  # pattern of a checkpoint that must be there, or ""
    seconds: float = 25.0  # longest time from the fault to the end [s]
    may_leave: str = ""  # pattern of files that may be left


@dataclasses.dataclass(frozen=True)
class _Failure:
    """How a job ends in which something fails."""

    error: str  # type of the error that ends the rank to which it happens; "": it ends without one
    code: int  # exit code of the job
    last: str  # how the last line printed begins
    alike: bool = False  # whether all ranks raise that error


_BOOM = "ValueError: boom in training_step"
_UNREPORTED = "Its process or host ended without reporting an error"
# What a rank 0 says of the others that the user has stopped and continued after they had given it up.
_GIVEN_UP = "It ended without a report; what it printed itself is above"

_FAILURES = {
    "raise": _Failure("ValueError", 1, _BOOM),
    "raise_all": _Failure("ValueError", 1, _BOOM, alike=True),
    "ours": _Failure("BatchSizeError", 1, r"(lightning_lockstep\.errors\.)?BatchSizeError: nothing fits"),
    "exit": _Failure("SystemExit", 3, "SystemExit: 3"),
    "kill": _Failure("", 128 + signal.SIGKILL, f"SIGKILL is sent by the operating system|{_UNREPORTED}"),
    "stop": _Failure("", 1, _UNREPORTED),
    "memory": _Failure("RuntimeError", 1, r"RuntimeError: .*DefaultCPUAllocator"),
    "nan": _Failure("OverflowDetectedError", 1, "", alike=True),
    "uneven": _Failure("ConfigurationError", 1, "", alike=True),
    "disk": _Failure("OSError", 1, r"OSError: \[Errno 28\]"),
    "folder": _Failure("NotADirectoryError", 1, r"NotADirectoryError: \[Errno 20\]"),
    "stdout": _Failure("BrokenPipeError", 1, r"BrokenPipeError: \[Errno 32\]"),
    "stderr_raise": _Failure("ValueError", 1, ""),
    "term_rank": _Failure("SIGTERMException", 128 + signal.SIGTERM, ""),
    "usr1_rank": _Failure("", 128 + signal.SIGUSR1, f"The other ranks were stopped|{_UNREPORTED}"),
    "term_parent": _Failure("SIGTERMException", 128 + signal.SIGTERM, ""),
    "usr1_parent": _Failure("", 128 + signal.SIGUSR1, ""),
}
# What is printed of an error that has more than one line, or of one that all ranks raise.
_PRINTED = {
    "nan": ("OverflowDetectedError",),
    "uneven": ("ConfigurationError: The ranks have different numbers of training batches",),
    "stop": ("was stopped for longer than silence_limit",),
    # Where rank 0 is gone, another one says so; mpirun ends the others before they could, and names it itself. MPICH's
    # mpiexec names its process, host and signal; with -disable-auto-cleanup the ranks can say which it was.
    "kill": (
        r"killed by SIGKILL|its (connection|process) has ended|signal 9 |SIGNAL: 9 "
        r"|PID \d+ RUNNING AT (?s:.*)\(signal 9\)",
    ),
    "usr1_rank": ("killed by SIGUSR1|its (connection|process) has ended|signal 10 |SIGNAL: 10 ",),
    "term_rank": ("SIGTERMException",),
    "memory": ("DefaultCPUAllocator: can't allocate memory",),
}
_PREEMPTED = 75
_INTERRUPTED = 130


def expect(plan: Plan) -> Expected:
    """Return what must come of a run."""
    # torch keeps the cache of its compiler; MPICH leaves its shared memory when a rank is killed or calls MPI_Abort, as
    # bare mpi4py programs show.
    may_leave = "torchinductor_|mpich_shm_" if plan.launch == "mpich" else "torchinductor_"
    return dataclasses.replace(_expected(plan), may_leave=may_leave)


def _expected(plan: Plan) -> Expected:
    fault = plan.fault
    if fault in ("ctrl_c", "ctrl_c_twice"):
        return _interrupted(plan)
    # Both are notices of Slurm, on which every strategy stops the ranks together.
    stops = "stop" in plan.callbacks or plan.launch == "srun"
    if stops and fault in ("term_rank", "usr1_rank", "term_parent", "usr1_parent"):
        return _preempted(plan)
    if fault not in _FAILURES or _does_not_hurt(plan):
        return _fitted(plan)
    failure = _FAILURES[fault]
    if _is_continued(plan):
        failure = dataclasses.replace(failure, last=f"{_UNREPORTED}|{_GIVEN_UP}")
    return _failed(plan, failure)


def _is_continued(plan: Plan) -> bool:
    """Whether the stopped rank is the first process, which its user continues once the others have gone."""
    return plan.fault == "stop" and plan.launch == "popen" and plan.target == 0


def _does_not_hurt(plan: Plan) -> bool:
    if plan.fault == "nan":
        return "overflow" not in plan.callbacks
    if plan.fault == "stdout":  # the ranks print to mpirun; that the parent cannot write stops no training
        return plan.launch == "mpirun"
    if plan.fault == "usr1_rank":  # MPICH has a handler for that, as a bare mpi4py program shows
        return plan.launch == "mpich"
    return plan.fault == "uneven" and plan.uneven_inputs != "error"


def _fitted(plan: Plan) -> Expected:
    # Python ends any program with 120 whose last words could not be written.
    codes = (0, 120) if plan.fault == "stderr" and plan.launch in ("popen", *MULTIPROCESSING) else (0,)
    return Expected(codes, dict.fromkeys(_programs(plan), ("",)), done=_programs(plan))


def _preempted(plan: Plan) -> Expected:
    # On the signal by which Slurm requeues a job it lies where Lightning looks for it then.
    is_of_slurm = plan.launch == "srun" and plan.fault.startswith("usr1")
    return Expected(
        _codes(plan, _PREEMPTED),
        dict.fromkeys(_programs(plan), ("Preempted",)),
        printed=("All ranks end here with exit code 75",),
        silent=plan.launch != "torchrun",
        # Without StopTogether it lies in the Trainer's folder, as Lightning's own for Slurm does.
        checkpoint=r"preempted\.ckpt" if "stop" in plan.callbacks and not is_of_slurm else r"step=4\.ckpt",
    )


def _interrupted(plan: Plan) -> Expected:
    # torchrun and mpirun end the ranks themselves, with a signal of their own.
    own = plan.launch in ("torchrun", *OF_USER)
    by_signal = own or plan.launch == "mpirun"
    return Expected(
        _codes(plan, _INTERRUPTED),
        {} if by_signal else dict.fromkeys(_programs(plan), ("KeyboardInterrupt", "SystemExit", "")),
        silent=not own and (plan.fault == "ctrl_c" or plan.launch == "mpirun"),
    )


def _failed(plan: Plan, failure: _Failure) -> Expected:
    by_mpirun = plan.launch in WITH_MPI and plan.fault in ("kill", "usr1_rank", "usr1_parent")
    # A logger that cannot write its file fails again whenever Lightning closes it: one traceback has all these errors.
    report = failure.last if failure.error and plan.fault != "disk" else ""
    if report and plan.launch == "torchrun":
        report = f"(  )?{report}"  # the traceback is in torchrun's own summary, indented
    at_the_end = plan.launch not in ("torchrun", "srun", *WITH_MPI)  # whose own remarks stand below
    return Expected(
        _codes(plan, failure.code),
        _raised(plan, failure),
        printed=_PRINTED.get(plan.fault, ()) + (() if by_mpirun else _headline(plan, failure)),
        report=report,
        times=1 if report else 0,
        last=_last_line(plan, failure) if at_the_end else "",
        checkpoint="" if plan.fault in ("folder", "uneven", "disk") else r"step=4\.ckpt",
        # torchrun gives a stopped rank 30 s to end.
        seconds=25.0 if plan.fault != "stop" else 70.0 if plan.launch == "torchrun" else 40.0,
    )


def _last_line(plan: Plan, failure: _Failure) -> str:
    """Return how the last line begins: below a traceback, with the rank that failed and where."""
    named = f"rank [0-9]+ of {plan.ranks} \\(host .*: "
    if not failure.last or not failure.error:
        return failure.last
    # Of an error that all ranks raise, each has its own; any may have been the first. A logger whose disk is full fails
    # again while Lightning handles that: what ends the program is another exception.
    # An error of this package is most often one of all ranks, so rank 0 prints its own without a rank.
    is_ours_of_0 = plan.fault == "ours" and plan.target == 0 and plan.launch == "popen"
    optional = "?" if failure.alike or plan.fault == "disk" or is_ours_of_0 else ""
    return f"({named}){optional}({failure.last})"


def _headline(plan: Plan, failure: _Failure) -> tuple[str, ...]:
    """What a rank raises and prints itself needs no headline; nor do errors that all ranks raise."""
    prints_itself = plan.target == 0 and failure.error and plan.launch not in MULTIPROCESSING
    if failure.alike or prints_itself or plan.fault in ("stderr_raise", "term_parent", "usr1_parent"):
        return ()
    return (f"rank {plan.target} of {plan.ranks} \\(host ",)


def _raised(plan: Plan, failure: _Failure) -> Mapping[str, tuple[str, ...]]:
    if plan.launch in MULTIPROCESSING:
        return {"parent": ("RankFailedError",)}
    own, others = (failure.error,), ("RankFailedError", "")
    if plan.launch in WITH_MPI:  # a rank that has printed the report ends the others by MPI_Abort
        own = (failure.error, "")
    if _is_continued(plan):
        own = ("", "RankFailedError")
    every = plan.fault in ("term_parent", "usr1_parent") and plan.launch != "popen"  # gets the signal
    if every or plan.fault == "raise_all":  # of which one may hear of another before it comes as far
        own = others = (failure.error, *others)
    return {str(rank): own if failure.alike or rank == plan.target else others for rank in range(plan.ranks)}


def _programs(plan: Plan) -> frozenset[str]:
    """Whose program comes to an end that can be seen: the ranks', or that of the parent that started them."""
    if plan.launch in MULTIPROCESSING:
        return frozenset({"parent"})
    return frozenset(map(str, range(plan.ranks)))


def _codes(plan: Plan, code: int) -> tuple[int, ...]:
    """Return which exit codes the first process may have where the job ends with ``code``."""
    if plan.launch == "torchrun":  # which a second Ctrl-C may end as it ends any program
        return (1, -signal.SIGINT) if plan.fault == "ctrl_c_twice" else (1,)
    if plan.launch in OF_USER:
        return tuple(range(1, 256))  # mpirun's own choice
    ended_by_signal = plan.fault in ("kill", "usr1_rank", "usr1_parent") and plan.launch == "popen"
    if ended_by_signal and code > 128 and (plan.target == 0 or plan.fault == "usr1_parent"):
        return (128 - code,)  # the first process is the rank that the signal ended
    return (code,)


_SESSION = "a second Ctrl-C kills Open MPI's daemon, which leaves its session folder and shared memory"
_THREAD = "the C library ends a process that has no memory left for the data of a new thread"
_MEMORY = "libzmq ends a process that has no memory left for a new connection"

#: What is known not to be as it must: faults, ways of starting ranks, a pattern of the difference ("": all), and why.
_KNOWN = (
    (("ctrl_c_twice",), ("mpirun",), "left behind: (ompi|prte|/dev/shm/sm_segment)", _SESSION),
    (("memory",), ("popen", "torchrun"), ": no error, expected RuntimeError", _MEMORY),
    (("memory",), MULTIPROCESSING, "not printed: 'rank ", _MEMORY),
    (("memory",), ("popen",), "exit code 127|thread-local data", _THREAD),
)


def known(plan: Plan, difference: str) -> str | None:
    """Return why a run may differ in this, where that is known; it then counts apart."""
    for faults, launches, pattern, reason in _KNOWN:
        if plan.fault in faults and plan.launch in launches and re.search(pattern, difference):
            return reason
    return None
