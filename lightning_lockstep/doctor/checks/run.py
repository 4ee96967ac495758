"""Check ``run``: how a run ended, by the reports in its folder, and the command that goes on from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from lightning_lockstep._run_folder import RunFolder
from lightning_lockstep._text import time_in_words
from lightning_lockstep.distributed.checkpoint_folder import PREEMPTED_FILE
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    Status,
    not_applicable,
    ok,
    problem,
    warning,
)

_WHO_KILLED = "sudo dmesg -T | grep -i 'out of memory'  # under Slurm: sacct -j JOB --format=State,MaxRSS"
_LISTED = 8  # jobs of a sweep that are named
_LONGEST = 700  # of a text that is quoted [characters]


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    if not options.folders:
        evidence = "none was given, as in: lockstep-doctor run outputs/train/2025-01-31_12-00-00"
        yield not_applicable("run folder", evidence)
    for given in options.folders:
        for found in _folder(RunFolder(given)):
            yield replace(found, evidence=f"{given}: {found.evidence}")


def _folder(folder: RunFolder) -> Iterable[Finding]:
    what, search = "run folder", "ls -d outputs/*/* multirun/*/*/* lightning_logs/*"
    if not folder.has():
        return [problem(what, "there is no such folder", search)]
    if folder.is_of_a_run:
        return _run(folder)
    below = folder.runs_below()
    if not below:
        evidence = "it has none of a run's files (.hydra, summary.json, failure.json, checkpoints, metrics.csv)"
        return [problem(what, evidence, search)]
    without = [run for run in below if not run.has("summary.json")]
    failed = [run for run in without if run.has("failure.json")]
    open_ones = [run for run in without if run in failed or run.is_of_lockstep_train]
    if not open_ones:
        return [ok(what, f"{len(below)} run folders below it; none of these runs has failed")]
    evidence = f"{len(below)} run folders below it; {len(failed)} failed"
    if len(open_ones) > len(failed):
        evidence += f", {len(open_ones) - len(failed)} without a summary"
    listed = " ".join(run.shown() for run in (failed or open_ones)[:_LISTED])
    return [(problem if failed else warning)(what, evidence, f"lockstep-doctor run {listed}")]


def _run(folder: RunFolder) -> Iterator[Finding]:
    """Yield what the reports of one run say; of several attempts in one folder that of the last."""
    summary, failure = folder.record("summary.json"), folder.record("failure.json")
    if failure is not None and folder.is_of_earlier_attempt("failure.json"):
        failure = None
    if summary is not None and failure is not None:
        is_newer = folder.age("failure.json") < folder.age("summary.json")
        summary, failure = (None, failure) if is_newer else (summary, None)
    found = list(_overflow(folder))
    if summary is not None:
        found += _finished(summary)
    elif failure is not None and not _has_problem(found):
        found.append(_failed(failure))
    found += _lost(folder)
    found += _batch_size(folder)
    is_needed = summary is None and not _has_problem(found)
    for name in dict.fromkeys(folder.unreadable):
        evidence = f"{name} cannot be read: its writer was killed, or the disk was full"
        fix = f"tail -c 500 {folder.shown(name)}; df -h {folder.shown()}"
        found.append((problem if is_needed else warning)("records", evidence, fix))
    if summary is None and failure is None and not _has_problem(found):
        found.append(_unknown(folder))
    yield from found
    if summary is None:
        yield _checkpoints(folder)


def _has_problem(found: Iterable[Finding]) -> bool:
    return any(finding.status is Status.PROBLEM for finding in found)


def _overflow(folder: RunFolder) -> Iterator[Finding]:
    """Quote the title of each report, and of the ranks what made the bad value and the remedy."""
    # Without a run folder of its own, the detector writes to that of the logger.
    for name in sorted(folder.glob("overflow/*.json", "*/overflow/*.json", "*/*/overflow/*.json")):
        if folder.is_of_earlier_attempt(name):
            continue
        lines = folder.text(str(PurePath(name).with_suffix(".txt"))).splitlines()
        marks = ("Producer:", "Remedy", "    in Python:", "    on the")
        shown = [line for line in lines if line.startswith(("Detected inf/nan", *marks, "Advice:"))]
        text = folder.shown(str(PurePath(name).with_suffix(".txt")))
        evidence = _quoted("\n".join(dict.fromkeys(shown))) or "nan or inf"
        yield problem("overflow", f"{evidence}\nFull report: {text}")


def _lost(folder: RunFolder) -> Iterator[Finding]:
    """Yield which ranks were killed while the others went on; of several attempts in one folder in the last."""
    lost = folder.record("lost.json")
    for event in () if lost is None or folder.is_of_earlier_attempt("lost.json") else lost.get("lost", ()):
        yield warning("lost rank", str(event.get("text", "")), _WHO_KILLED)


def _failed(failure: Mapping[str, Any]) -> Finding:
    summary, traceback = (str(failure.get(name, "")) for name in ("summary", "traceback"))
    where = failure.get("where")
    place = "".join(f", {key} {value}" for key, value in (where if isinstance(where, dict) else {}).items())
    who = f"rank {failure.get('rank')} of {failure.get('world_size')} on {failure.get('host')}{place}"
    if failure.get("kind") == "interrupt":
        return ok("run", f"interrupted by Ctrl-C, on {who}")
    if "SIGKILL" in summary:
        what = "The kernel (out of memory), a scheduler (at a limit) or a user killed it"
        return problem("killed", f"{who}: {summary}. {what}", _WHO_KILLED)
    # The innermost frames are last; those of libraries were left out when it was written.
    message, _, stack = traceback.removeprefix("lightning_lockstep.errors.").partition("Stack of rank")
    advice = stack.rpartition("\n\n")[2]  # below the stack
    shown = f"{message.strip()}\n{advice}".strip()
    told = f"{summary}\n{shown[-_LONGEST:]}" if traceback.startswith("Traceback") else _quoted(shown)
    subject = "collective guard" if summary.startswith("Collective") else "failure"
    return problem(subject, f"{who}: {told or _quoted(summary)}")


def _finished(summary: Mapping[str, Any]) -> Iterator[Finding]:
    metrics = summary.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    shown = ", ".join(
        f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in list(metrics.items())[:4]
    )
    yield ok("run", f"it finished: {summary.get('steps')} steps on {_ranks(summary)}; {shown}")
    if bad := [name for name, value in metrics.items() if isinstance(value, str)]:  # nan, inf
        fix = "# which module, rank and batch: Trainer(callbacks=[OverflowDetector()]), or"
        yield problem("metrics", f"{', '.join(bad)} is not finite", fix, "lockstep-train debug=overflow ...")


def _batch_size(folder: RunFolder) -> Iterator[Finding]:
    result = folder.record("batch_size.json")
    if result is not None:
        yield ok(
            "batch size",
            f"{result.get('size')} per rank x {result.get('accumulate')} accumulated x {_ranks(result)}"
            f" ({result.get('reason')})",
        )


def _unknown(folder: RunFolder) -> Finding:
    for name in folder.glob(PREEMPTED_FILE, f"checkpoints/{PREEMPTED_FILE}"):
        left = None if folder.is_of_earlier_attempt(name) else folder.record(name)
        if left is not None:
            saved, reason = left.get("checkpoint"), left.get("reason")
            return ok("run", f"all ranks left it together and saved {saved}: {reason}")
    if not folder.is_of_lockstep_train:
        evidence = (
            "no failure was recorded, and a Trainer of a script leaves no summary: it ended well, still runs, or was"
            " killed with all its ranks"
        )
        return ok("run", evidence)
    newest = min(map(folder.age, folder.glob("*", "*/*", "*/*/*")), default=math.inf)
    evidence = (
        f"neither a summary nor a record of a failure; last written to {time_in_words(max(0, newest))} ago: it still"
        " runs, it was killed (memory, time limit, a lost host), or it ended before its first step"
    )
    return warning("run", evidence, _WHO_KILLED)


def _checkpoints(folder: RunFolder) -> Finding:
    found = folder.checkpoints()
    if not found:
        evidence = "no complete one was saved; the run must start from the beginning"
        return not_applicable("checkpoints", evidence)
    evidence = f"{len(found)}, the newest is {found[0]}; the run can resume from it"
    script = f'# in the script: trainer.fit(..., ckpt_path="{PurePath(folder.given, found[0])}")'
    # Of a user's own program on `train()`, only the user knows the command.
    again = f"# the command of the run once more, with ckpt_path={folder.shown(found[0])}"
    other = again if folder.has(".begun") else script
    return ok("checkpoints", evidence, folder.resume_command(found[0]) or other)


def _ranks(record: Mapping[str, Any]) -> str:
    return "1 rank" if record.get("ranks") == 1 else f"{record.get('ranks')} ranks"


def _quoted(text: str) -> str:
    shown = re.sub(r"\n{2,}", "\n", text.strip())
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST].rstrip()} ..."
