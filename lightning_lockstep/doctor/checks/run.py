"""Check ``run``: how a run ended, by the records in its folder, and what to do next."""

from __future__ import annotations

import csv
import glob
import json
import math
import re
import shlex
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import yaml

from lightning_lockstep.deepspeed.checkpoints.file_names import is_state_file
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    Status,
    check,
    not_applicable,
    ok,
    problem,
    warning,
)

# -- A run folder as the check ``run`` reads it: its records, its checkpoints, and when they were written

# What a run leaves in its folder, Hydra's own first; the last ones are those of a logger of Lightning.
_MARKS = (
    ".hydra",
    "summary.json",
    "failure.json",
    "guard-report.json",
    "batch_size.json",
    "overflow",
    "checkpoints",
    "csv/metrics.csv",
    "metrics.csv",
    "hparams.yaml",
)
_STARTED = ".hydra/overrides.yaml"  # rewritten at the start of each attempt
_CHECKPOINTS = ("checkpoints/*.ckpt", "*.ckpt")
_WITHOUT_OPTIMIZER = ".consolidated.ckpt"
_UNQUOTED = re.compile(r"[\w./:@%+-]+")


class RunFolder:
    """A folder that a user has named."""

    def __init__(self, machine: Machine, given: str) -> None:
        self._machine = machine
        self.given = given  # as the user wrote it
        self._path = str(Path(given).absolute())
        self.unreadable: list[str] = []  # records that were asked for and could not be read

    @property
    def is_of_a_run(self) -> bool:
        """Whether it contains a file of a run."""
        return any(self.has(mark) for mark in _MARKS)

    @property
    def is_of_lockstep_train(self) -> bool:
        """Whether Hydra has made it: such a run leaves a summary, and goes on by a command."""
        return self.has(".hydra")

    def runs_below(self) -> list[RunFolder]:
        """Return the run folders in it, such as those of the jobs of a sweep, in the order of their numbers."""
        for names in ("*", "*/*"):  # a script's runs are in lightning_logs/version_0 and so on
            below = [RunFolder(self._machine, str(PurePath(self.given, name))) for name in self.glob(names)]
            if found := [folder for folder in below if folder.is_of_a_run]:
                return sorted(found, key=lambda folder: (len(folder.given), folder.given))
        return []

    def has(self, name: str = "") -> bool:
        return self._machine.exists(f"{self._path}/{name}")

    def glob(self, *patterns: str) -> list[str]:
        """Return the names that match, relative to the folder, whatever characters its own name has."""
        below = glob.escape(self._path)
        found = [path for pattern in patterns for path in self._machine.glob(f"{below}/{pattern}")]
        return [str(PurePath(path).relative_to(self._path)) for path in found]

    def text(self, name: str) -> str:
        """Return what a file holds, the empty string where there is none."""
        return self._machine.read_text(f"{self._path}/{name}", whole=True) or ""

    def record(self, name: str) -> dict[str, Any] | None:
        """Return a record of the run; ``None`` where there is none, or where it cannot be read (see ``unreadable``)."""
        if not self.has(name):
            return None
        try:
            found = json.loads(self.text(name))
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        self.unreadable.append(name)
        return None

    def age(self, name: str) -> float:
        """Return how long ago a file was written to [s]; infinite where there is none."""
        try:
            return time.time() - Path(self._path, name).stat().st_mtime
        except OSError:
            return math.inf

    def is_of_earlier_attempt(self, name: str) -> bool:
        """Return whether a file was written before the attempt began that was the last one."""
        return self.has(_STARTED) and self.age(name) > self.age(_STARTED)

    def checkpoints(self) -> list[str]:
        """Return the complete checkpoints, from which a run can resume, the newest first."""
        names = [name for name in self.glob(*_CHECKPOINTS) if not name.endswith(_WITHOUT_OPTIMIZER)]
        return sorted(filter(self._is_whole, names), key=self.age)

    def _is_whole(self, name: str) -> bool:
        path = Path(self._path, name)
        if path.is_dir():  # DeepSpeed's
            return any(is_state_file(file.name) for file in path.glob("**/*.pt"))
        return zipfile.is_zipfile(path)  # torch's files are archives, with their index at the end

    def shown(self, name: str = "") -> str:
        """Return the path of a file in it, to paste into a shell."""
        return shlex.quote(str(PurePath(self.given, name)))

    def resume_command(self, checkpoint: str) -> str | None:
        """Return the command of lockstep-train that goes on from a checkpoint in it; `None` for another program."""
        try:
            hydra = yaml.safe_load(self.text(".hydra/hydra.yaml"))["hydra"]
            job, typed = hydra["job"], hydra["overrides"]
            sources = {each["provider"]: each["path"] for each in hydra["runtime"]["config_sources"]}
            if (job["name"], sources["main"]) != ("train", "lightning_lockstep.conf"):
                return None
            given = ["--config-dir", sources["command-line"]] if "command-line" in sources else []
            given += ["--config-name", job["config_name"]] if job["config_name"] != "lockstep_train" else []
            given += [line for line in typed["hydra"] if "hydra.searchpath=" in line]
            given += [line for line in typed["task"] if not line.startswith("ckpt_path=")]
        except (yaml.YAMLError, LookupError, TypeError):
            return None
        path = str(PurePath(self.given, checkpoint))
        if not _UNQUOTED.fullmatch(path):  # for Hydra too such a path has quotes
            path = '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return " ".join(["lockstep-train", *map(shlex.quote, [*given, f"ckpt_path={path}"])])


# -- Check ``run``: how a run ended, by the records in its folder, and what to do next --

_WHY = """
When a run has failed, its folder contains the report of the collective guard (which rank did not arrive, and where it
was), those of the overflow detector (which module made the first nan), the record of the first failure, the result of a
search for a batch size, the summary, the logged metrics and the checkpoints. This check reads them together and reports
what happened first, and which command to run next.
"""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "OutOfMemoryError", "MemoryError")
_WHO_KILLED = (
    "# on the host of that rank, and where a scheduler started the job:",
    "sudo dmesg -T | grep -i -E 'out of memory|oom'",
    "sacct -j JOB --format=JobID,State,ExitCode,ReqMem,MaxRSS,Elapsed,Timelimit",
)
# What to do next, as a command of lockstep-train or, for another program, in it.
_SMALLER_BATCH = {
    True: (
        "# micro-batches that fit on all ranks, in the same optimizer steps:",
        "lockstep-train callbacks=auto_batch_size ...",
        "# or split a batch that does not fit, and continue:",
        "lockstep-train callbacks=auto_batch_size callbacks.auto_batch_size.on_oom=split ...",
    ),
    False: (
        "# micro-batches that fit on all ranks, in the same optimizer steps:",
        "Trainer(callbacks=[AutoBatchSize()], ...)",
        "# or split a batch that does not fit, and continue:",
        'Trainer(callbacks=[AutoBatchSize(on_oom="split")], ...)',
    ),
}
_FIND_OVERFLOW = {
    True: "lockstep-train debug=overflow ...  # which module, rank and batch",
    False: "Trainer(callbacks=[OverflowDetector()], ...)  # which module, rank and batch",
}
_VERIFY = {True: "lockstep-train debug=collectives ...", False: "LOCKSTEP_DEBUG=1 python ..."}
_LISTED = 8  # jobs of a sweep that are named
_LONGEST = 700  # of a text that is quoted [characters]
_QUIET = 120.0  # a folder that was written to since may be that of a run at work [s]


@check(name="run", summary="run folders: what happened, and what to do next", why=_WHY, timeout=30.0)
def run(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Read run folders."""
    if not options.folders:
        yield not_applicable(
            "run folder", "none was given, as in: lockstep-doctor run outputs/train/2025-01-31_12-00-00"
        )
    for given in options.folders:
        for found in _folder(RunFolder(machine, given)):
            yield replace(found, evidence=f"{given}: {found.evidence}")


def _folder(folder: RunFolder) -> Iterable[Finding]:
    what, search = "run folder", "ls -d outputs/*/* multirun/*/*/* lightning_logs/*"
    if not folder.has():
        return [problem(what, "there is no such folder", search)]
    if folder.is_of_a_run:
        return _run(folder)
    below = folder.runs_below()
    if not below:
        evidence = (
            "it contains no file of a run (.hydra, summary.json, failure.json, checkpoints, metrics.csv)"
        )
        return [problem(what, evidence, search)]
    without = [run for run in below if not run.has("summary.json")]
    failed = [run for run in without if run.has("failure.json") or run.has("guard-report.json")]
    open_ones = [run for run in without if run in failed or run.is_of_lockstep_train]
    if not open_ones:
        return [ok(what, f"{len(below)} run folders below it; none of these runs has failed")]
    evidence = f"{len(below)} run folders below it; {len(failed)} failed"
    if len(open_ones) > len(failed):
        evidence += f", {len(open_ones) - len(failed)} without a summary"
    listed = " ".join(run.shown() for run in (failed or open_ones)[:_LISTED])
    return [(problem if failed else warning)(what, evidence, f"lockstep-doctor run {listed}")]


def _run(folder: RunFolder) -> Iterator[Finding]:
    """Yield what the records of one run say; of several attempts in one folder that of the last."""
    summary, failure = folder.record("summary.json"), folder.record("failure.json")
    if failure is not None and folder.is_of_earlier_attempt("failure.json"):
        failure = None
    if summary is not None and failure is not None:
        is_newer = folder.age("failure.json") < folder.age("summary.json")
        summary, failure = (None, failure) if is_newer else (summary, None)
    found = [*_guard(folder), *_overflow(folder)]
    if summary is not None:
        found += _finished(summary, folder)
    elif failure is not None and not _has_problem(found):
        found.append(_failed(failure, folder))
    found += [*_batch_size(folder), *_metrics(folder)]
    found += _unreadable(folder, is_needed=summary is None and not _has_problem(found))
    if summary is None and failure is None and not _has_problem(found):
        found.append(_unknown(folder))
    yield from found
    if summary is None:
        yield _checkpoints(folder)


def _has_problem(found: Iterable[Finding]) -> bool:
    return any(finding.status is Status.PROBLEM for finding in found)


def _unreadable(folder: RunFolder, *, is_needed: bool) -> Iterator[Finding]:
    for name in dict.fromkeys(folder.unreadable):
        yield (problem if is_needed else warning)(
            "records",
            f"{name} cannot be read: its writer was killed, or the disk was full",
            f"tail -c 500 {folder.shown(name)}; df -h {folder.shown()}",
        )


def _guard(folder: RunFolder) -> Iterator[Finding]:
    name = "guard-report.json"
    report = folder.record(name)
    if report is None:
        return
    subject = "collective guard"
    if folder.has("summary.json") and folder.age(name) > folder.age("summary.json"):
        evidence = f"{name} is older than the summary: of an earlier attempt, or of a wait that has ended"
        yield not_applicable(subject, evidence)
        return
    what, then = "a collective did not complete", ("# is it the network?", "lockstep-doctor network")
    if report.get("error") == "CollectiveMismatchError":
        what = "the ranks called different collectives"
        then = (
            "# the same run with each collective compared before it is called:",
            _VERIFY[folder.is_of_lockstep_train],
        )
    text = re.split("Stack of rank|With guard=", str(report.get("text", "")))[0]
    yield problem(subject, f"{what}. {_quoted(text)}\n(the stacks of all ranks: {name})", *then)


def _overflow(folder: RunFolder) -> Iterator[Finding]:
    for name in _reports(folder):
        ranks = (folder.record(name) or {}).get("ranks")
        if not isinstance(ranks, list):
            continue
        with_producer = [rank for rank in map(_table, ranks) if _producer(rank)]
        text = folder.shown(str(PurePath(name).with_suffix(".txt")))
        if not with_producer:
            evidence = f"nan or inf, but no module was found that made it: see {text}"
            yield problem("overflow", evidence, f"less {text}")
            continue
        first = with_producer[0]
        producer, remedy = _producer(first), _table(first.get("remedy"))
        where = f"rank {first.get('rank')}, batch {first.get('batch_number', '?')}"
        evidence = f"{_origin(producer)} ({where}); the frames before it are in {text}"
        if remedy.get("text"):
            evidence += f". {_quoted(str(remedy['text']))}"
        yield problem("overflow", evidence, f"less {text}", *_against_overflow(producer, remedy))


def _origin(producer: Mapping[str, Any]) -> str:
    module = producer.get("module") or "the LightningModule"
    if producer.get("kind") == "batch":
        return "the batch already contained nan or inf"
    if producer.get("kind") == "weight":
        return f"the weights of {module} were already nan or inf"
    return f"{module} made the first nan or inf"


def _against_overflow(producer: Mapping[str, Any], remedy: Mapping[str, Any]) -> list[str]:
    """Return what to run next: only modules for which the report names that remedy are to run in float32."""
    modules = remedy.get("modules")
    if isinstance(modules, list) and modules:
        tried = "with which the replayed batch passed" if remedy.get("tried") else "not tried"
        override = f"callbacks.fp32_modules.modules=[{','.join(map(str, modules))}]"
        return [
            f"# run these modules in float32 ({tried}):",
            f"lockstep-train callbacks=[overflow,fp32_modules] {shlex.quote(override)} ...",
        ]
    if producer.get("kind") == "batch":
        return []
    return [
        "# clip gradients and lower the learning rate:",
        "lockstep-train callbacks=overflow trainer.gradient_clip_val=1.0 model.learning_rate=LOWER ...",
    ]


def _reports(folder: RunFolder) -> list[str]:
    """Return the reports of the overflow detector; without its own folder, it writes to that of the logger."""
    names = folder.glob("overflow/*.json", "*/overflow/*.json", "*/*/overflow/*.json")
    return [name for name in names if not folder.is_of_earlier_attempt(name)]


def _producer(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    return _table(rank.get("producer")) or _table(rank.get("backward_producer"))


def _failed(failure: Mapping[str, Any], folder: RunFolder) -> Finding:
    summary = str(failure.get("summary", "of unknown cause"))
    place = "".join(f", {key} {value}" for key, value in _table(failure.get("where")).items())
    who = f"rank {failure.get('rank')} of {failure.get('world_size')} on {failure.get('host')}{place}"
    evidence = f"{who}: {_quoted(summary)}"
    if failure.get("kind") == "interrupt":
        return ok("run", f"interrupted by Ctrl-C, on {who}")
    if "SIGKILL" in summary:
        evidence += ". The kernel (out of memory), a scheduler (at a limit) or a user killed it"
        return problem("killed", evidence, *_WHO_KILLED)
    if any(word in summary for word in _OUT_OF_MEMORY):
        return problem("out of memory", evidence, *_SMALLER_BATCH[folder.is_of_lockstep_train])
    traceback = str(failure.get("traceback", ""))
    if traceback and not traceback.startswith("Traceback"):  # an error of this package: its whole message
        text = traceback.removeprefix("lightning_lockstep.errors.").partition("Stack of rank")[0]
        evidence = f"{who}: {_quoted(text)}"
    elif lines := _raised_at(traceback):
        evidence += f"\n{lines}"
    return problem("failure", evidence)


def _raised_at(traceback: str) -> str:
    """Return the innermost place of a traceback that is in the user's own files, and the line that stands there."""
    lines = traceback.splitlines()
    places = [i for i, line in enumerate(lines) if re.match(r' +File ".*", line \d+', line)]
    own = [i for i in places if "-packages" not in lines[i] and not lines[i].lstrip().startswith('File "<')]
    return "\n".join(line.strip() for line in lines[own[-1] : own[-1] + 2]) if own else ""


def _finished(summary: Mapping[str, Any], folder: RunFolder) -> Iterator[Finding]:
    metrics = _table(summary.get("metrics"))
    shown = ", ".join(
        f"{name} {f'{value:.4g}' if isinstance(value, float) else value}"
        for name, value in list(metrics.items())[:4]
    )
    yield ok("run", f"it finished: {summary.get('steps')} steps on {_ranks(summary)}; {shown}")
    bad = [name for name, value in metrics.items() if not _is_finite(value)]
    if bad:
        yield problem(
            "metrics", f"{', '.join(bad)} is not finite", _FIND_OVERFLOW[folder.is_of_lockstep_train]
        )


def _batch_size(folder: RunFolder) -> Iterator[Finding]:
    result = folder.record("batch_size.json")
    if result is not None:
        trials = result.get("trials")
        count = len(trials) if isinstance(trials, list) else "?"
        yield ok(
            "batch size",
            f"{result.get('size')} per rank x {result.get('accumulate')} accumulated x {_ranks(result)}, after"
            f" {count} trials ({result.get('reason')})",
        )


def _metrics(folder: RunFolder) -> Iterator[Finding]:
    """The first row of the last attempt's log with a loss that is not finite, where no report says more."""
    logs = folder.glob("metrics.csv", "csv/metrics.csv", "csv/*/metrics.csv")
    if not logs or _reports(folder):
        return
    for row in csv.DictReader(folder.text(min(logs, key=folder.age)).replace("\0", "").splitlines()):
        for name, value in row.items():
            if name and "loss" in name and value and not _is_finite(value):
                evidence = (
                    f"{name} is {value} at step {row.get('step', '?')}; the overflow detector was not active"
                )
                yield problem("metrics", evidence, _FIND_OVERFLOW[folder.is_of_lockstep_train])
                return


def _unknown(folder: RunFolder) -> Finding:
    newest = min(map(folder.age, folder.glob("*", "*/*", "*/*/*")), default=math.inf)
    if newest < _QUIET:
        evidence = f"no summary yet, and it was written to {newest:.0f} s ago: it may still be running"
        return ok("run", evidence)
    if not folder.is_of_lockstep_train:
        evidence = (
            "no failure was recorded, and a Trainer of a script leaves no summary: it ended well, still runs, or was"
            " killed with all its ranks"
        )
        return ok("run", evidence)
    evidence = (
        "neither a summary nor a record of a failure: it was killed (memory, time limit, a lost host), or ended"
        " before its first step"
    )
    return warning("run", evidence, *_WHO_KILLED)


def _checkpoints(folder: RunFolder) -> Finding:
    found = folder.checkpoints()
    if not found:
        evidence = "no complete one was saved; the run must start from the beginning"
        return not_applicable("checkpoints", evidence)
    evidence = f"{len(found)}, the newest is {found[0]}; the run can resume from it"
    command = folder.resume_command(found[0])
    return Finding(Status.OK, "checkpoints", evidence, (command,) if command else ())


def _table(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _ranks(record: Mapping[str, Any]) -> str:
    return "1 rank" if record.get("ranks") == 1 else f"{record.get('ranks')} ranks"


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return True  # a text


def _quoted(text: str) -> str:
    shown = re.sub(r"\n{2,}", "\n", text.strip())
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST].rstrip()} ..."
