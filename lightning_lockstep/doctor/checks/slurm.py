"""Check ``slurm``: where this process is in a job, its tasks and devices, MPI types, time limit and signal."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress

from lightning_lockstep._system import Completed
from lightning_lockstep._text import counted
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning
from lightning_lockstep.launchers.rank_variables import INTERACTIVE, StartedRank, counts_in, find_slurm_step

_ASK = 15.0  # longest wait for a command of Slurm [s]
_SAVE = 60.0  # a signal that comes later before the limit leaves little time for a checkpoint [s]
# The error of srun without one.
_NO_CLUSTER = ("failed to fetch config", "Could not establish a configuration source")
_SIGNALS = ("TERM", "USR1")  # what StopTogether watches
# As sbatch reads it: options R and B, a number or a name, how long before the limit [s].
_SIGNAL = re.compile(r"(?:([RB]*):)?(?:SIG)?([^@\s]+)(?:@(\d+))?", re.IGNORECASE)
# Which type of srun's --mpi makes ranks of an MPI: by the vendor that mpi4py reports, the best first.
_PMI2 = ("pmi2", "pmix")
_TYPES = {"Open MPI": ("pmix",), "MPICH": _PMI2, "Intel MPI": _PMI2, "MVAPICH": _PMI2}


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    environ = machine.environment
    job, has_srun = environ.get("SLURM_JOB_ID"), machine.which("srun") is not None
    if job is None and not has_srun:
        yield not_applicable("Slurm", "there is no srun here, and no job in the environment")
        return
    listed = machine.run(["srun", "--mpi=list"], _ASK) if has_srun else Completed(127)
    if job is None and any(text in listed.error for text in _NO_CLUSTER):
        evidence = "srun is installed, but this host belongs to no cluster: srun finds no slurm.conf"
        yield not_applicable("Slurm", evidence)
        return
    if job is None:
        evidence = "a login node, or a node outside any job: ranks start with sbatch, or srun in salloc"
        yield ok("place", evidence)
    else:
        step = find_slurm_step(environ)
        yield _place(job, step, environ)
        yield from _tasks(step, environ)
    if not has_srun:
        evidence = "it is not in PATH of this node; ranks are started with it"
        yield problem("srun", evidence, "which -a srun sbatch")
        return
    yield _mpi_types(machine, listed)
    if job is not None:
        yield _time(machine, job)


def _place(job: str, step: StartedRank | None, environ: Mapping[str, str]) -> Finding:
    subject, name = "place", environ.get("SLURM_JOB_NAME", "")
    if name in INTERACTIVE:
        evidence = f"job {job} is called {name!r}, which Lightning takes for an interactive job:"
        return warning(subject, f"{evidence} each task trains alone", "salloc --job-name=train ...")
    if step is not None:
        nodes = counted(len(step.per_node), "node")
        return ok(subject, f"task {step.rank} of {step.size} in step {step.step}, on {nodes}")
    nodes, tasks = (environ.get(key, "1") for key in ("SLURM_JOB_NUM_NODES", "SLURM_NTASKS"))
    what = f"the batch script or shell of job {job} (nodes: {nodes}, tasks: {tasks}), not a task of srun"
    if nodes == tasks == "1":
        return ok(subject, f"{what}: one process can start the ranks of this node itself")
    return problem(
        subject,
        f"{what}: a program started here runs once, on this node alone, and waits for the others. Put srun in front of"
        " it",
        "srun --kill-on-bad-exit lockstep-train strategy=ddp",
    )


def _tasks(step: StartedRank | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    counts = step.per_node if step is not None else counts_in(environ.get("SLURM_TASKS_PER_NODE", ""))
    if not counts:
        return
    subject, tasks, devices = "tasks per node", counts[0], _devices(environ)
    if len(set(counts)) > 1:
        evidence = f"the nodes have {'+'.join(map(str, counts))} tasks: every node needs the same number"
        each = math.ceil(sum(counts) / len(counts))
        yield problem(subject, evidence, f"#SBATCH --nodes={len(counts)} --ntasks-per-node={each}")
        return
    on = f"{tasks} on {counted(len(counts), 'node')}"
    if devices is None:
        yield ok(subject, f"{on}; Slurm has given the job no devices")
    elif devices == tasks:
        yield ok(subject, f"{on}, a device for each")
    else:
        what = "the others are idle" if devices > tasks else "several ranks would share one"
        yield (warning if devices > tasks else problem)(
            subject,
            f"{counted(tasks, 'task')} on a node with {counted(devices, 'device')}: {what}. One task for each device",
            f"#SBATCH --ntasks-per-node={devices} --gpus-per-node={devices}",
        )


def _devices(environ: Mapping[str, str]) -> int | None:
    given = environ.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]
    if given.isdecimal():
        return int(given)
    listed = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS")
    return len(listed.split(",")) if listed else None


def _mpi_types(machine: Machine, done: Completed) -> Finding:
    # One a line, below a title.
    names = re.findall(r"^\s*(?:srun:)?[ \t]*(\w+)[ \t]*$", done.output + done.error, re.MULTILINE)
    subject, offered = "MPI types", [name for name in dict.fromkeys(names) if name != "none"]
    if not offered:
        why = "srun --mpi=list gave no answer in time" if done.timed_out else "srun --mpi=list names none"
        return warning(subject, f"{why}: {(done.error or done.output).strip()[:200]}")
    listed = f"this Slurm offers {', '.join(offered)}"
    if "mpi4py" not in machine.python.packages:
        return ok(subject, f"{listed}; mpi4py is not installed, and strategy=ddp needs none of them")
    vendor = str(machine.probe("mpi_library").facts.get("vendor", ""))
    wanted = _TYPES.get(vendor, ())
    fitting = [kind for kind in offered if kind.startswith(wanted)]
    config = machine.run(["scontrol", "show", "config"], _ASK).output
    of_cluster = re.search(r"^MpiDefault\s*=\s*(\S+)", config, re.MULTILINE)
    default = machine.environment.get("SLURM_MPI_TYPE") or (of_cluster[1] if of_cluster else "")
    if not wanted or default in fitting:
        return ok(subject, f"{listed}, by default {default or 'none'}; mpi4py loads {vendor or '?'}")
    evidence = f"{listed}, by default {default or 'none'}; mpi4py's {vendor} needs {' or '.join(wanted)}"
    if fitting:
        return warning(subject, evidence, f"srun --mpi={fitting[0]} lockstep-train strategy=mpi")
    fix = "# in the batch script, without srun: lockstep-train strategy=mpi strategy.hostfile=HOSTFILE"
    return problem(subject, f"{evidence}: under srun each rank would be rank 0 of 1", fix)


def _time(machine: Machine, job: str) -> Finding:
    subject, fix = "time limit", "#SBATCH --signal=USR1@120"
    shown = machine.run(["scontrol", "show", "job", "--oneliner", job], _ASK).output
    limit = re.search(r"\bTimeLimit=(\S+)", shown)
    if limit is None:
        return warning(subject, f"scontrol shows no time limit of job {job}")
    if limit[1] == "UNLIMITED":
        return ok(subject, "none")
    script = machine.run(["scontrol", "write", "batch_script", job, "-"], _ASK).output
    options, name, seconds = _signal(script, machine.environment)
    if not name:
        return warning(
            subject,
            f"{limit[1]}, and no --signal in the batch script: unless sbatch was given one, the tasks get SIGTERM at"
            " the limit and SIGKILL soon after (KillWait), the only time for a checkpoint; the job is not requeued",
            f"{fix}   # StopTogether then saves, and the job is requeued",
        )
    evidence = f"{limit[1]}, with --signal={name}"
    if "B" in options:
        return warning(subject, f"{evidence}: it is sent to the batch script alone", fix)
    if name not in _SIGNALS:
        return warning(subject, f"{evidence}: StopTogether does not handle it", fix)
    if seconds < _SAVE:
        evidence += f" {seconds} s before it: the last batch and the checkpoint must fit in"
        return warning(subject, evidence, fix)
    return ok(subject, f"{limit[1]}; {name} comes {seconds} s before it, and StopTogether saves then")


def _signal(script: str, environ: Mapping[str, str]) -> tuple[str, str, int]:
    """Return the options of ``--signal``, the name of the signal, empty if there is none, and how long before [s]."""
    given = re.findall(r"^#SBATCH\s.*--signal[= ](\S+)", script, re.MULTILINE)
    text = given[-1] if given else environ.get("SBATCH_SIGNAL") or environ.get("SLURM_SIGNAL") or ""
    found = _SIGNAL.match(text.strip("'\""))
    if found is None:
        return "", "", 0
    options, name, before = found.groups()
    with suppress(ValueError):  # of a name, or of a number that no signal has
        name = signal.Signals(int(name)).name.removeprefix("SIG")
    return (options or "").upper(), name.upper(), int(before or 60)
