"""Check ``run``: what a run folder says of how the run ended, and what to do next."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from lightning_lockstep.doctor.findings import Finding, Status, not_applicable, ok, problem, warning
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.registry import check

__all__ = ["run"]

_WHY = """
When a run has gone wrong, what is known of it lies in its folder: the report of the collective guard (which rank did
not arrive, and where it was), those of the overflow detector (which module made the first nan), the record of the
failure that came first, the result of a search for a batch size, the summary, the logged metrics, the checkpoints. This
check reads them together, says what happened first, and which command to run next.
"""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "OutOfMemoryError", "MemoryError", "SIGKILL")
_COMPARED = (
    "# the same run, with each collective compared before it is called:",
    "lockstep-train debug=collectives ...",
)
_LONGEST = 700  # of a text that is quoted [characters]
_QUIET = 120.0  # a folder that was written to since may be that of a run at work [s]


@check(name="run", summary="run folders: what happened, and what to do next", why=_WHY, timeout=30.0)
def run(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Read run folders.

    Args:
        machine: The machine to look at.
        options: ``folders`` counts.
    """
    if not options.folders:
        yield not_applicable(
            "run folder", "none was given, as in: lockstep-doctor run outputs/train/2025-01-31_12-00-00"
        )
    for given in options.folders:
        yield from _folder(machine, str(Path(given).absolute()), given)


def _folder(machine: Machine, folder: str, given: str) -> Iterator[Finding]:
    if not machine.exists(folder):
        yield problem("run folder", f"{given}: there is no such folder", "ls -d outputs/*/* multirun/*/*/*")
        return
    found = [*_guard(machine, folder, given), *_overflow(machine, folder, given)]
    failure = _json(machine, f"{folder}/failure.json")
    summary = _json(machine, f"{folder}/summary.json")
    if summary is not None:
        found += _finished(summary, given)
    if (
        failure is not None
        and not any(finding.status.value == "problem" for finding in found)
        and summary is None
    ):
        found += _failed(failure, given)
    found += [*_batch_size(machine, folder, given), *_metrics(machine, folder, given)]
    if (summary is None and failure is None and not found) or (
        summary is None and not any(finding.status.value == "problem" for finding in found)
    ):
        found.append(_unknown(machine, folder, given))
    found += _checkpoints(machine, folder, given, finished=summary is not None)
    yield from found


def _guard(machine: Machine, folder: str, given: str) -> Iterator[Finding]:
    report = _json(machine, f"{folder}/guard-report.json")
    if report is None:
        return
    text = str(report.get("text", ""))
    mismatch = report.get("error") == "CollectiveMismatchError"
    what = "the ranks called different collectives" if mismatch else "a collective did not complete"
    yield problem(
        "collective guard",
        f"{given}: {what}. {_quoted(text.partition('Stack of')[0])}",
        f"less {given}/guard-report.json  # where each rank was, with its stack",
        "# the same run with each collective compared before it is called:"
        if mismatch
        else "# and the network itself:",
        "lockstep-train debug=collectives ..." if mismatch else "lockstep-doctor network",
    )


def _overflow(machine: Machine, folder: str, given: str) -> Iterator[Finding]:
    for path in _reports(machine, folder):
        report = _json(machine, path)
        ranks = report.get("ranks") if report is not None else None
        if not isinstance(ranks, list):
            continue
        with_producer = [rank for rank in ranks if isinstance(rank, dict) and _producer(rank)]
        text = str(PurePath(given, PurePath(path).relative_to(folder).with_suffix(".txt")))
        if not with_producer:
            yield problem(
                "overflow", f"{given}: nan or inf, and no module that made it: see {text}", f"less {text}"
            )
            continue
        first = with_producer[0]
        module = str(_producer(first).get("module", "?"))
        where = f"rank {first.get('rank')}, batch {first.get('batch_number', '?')}"
        yield problem(
            "overflow",
            f"{given}: {module} made the first nan or inf ({where}); the frames before it are in {text}",
            f"less {text}",
            "# run that module in float32 (with precision=16-mixed or bf16-mixed):",
            f"lockstep-train callbacks=[overflow,fp32_modules] 'callbacks.fp32_modules.modules=[{module}]' ...",
        )


def _reports(machine: Machine, folder: str) -> list[str]:
    """Return the reports of the overflow detector; without a folder of its own, it writes to that of the logger."""
    return [*machine.glob(f"{folder}/overflow/*.json"), *machine.glob(f"{folder}/*/overflow/*.json")]


def _producer(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("producer", "backward_producer"):
        found = rank.get(name)
        if isinstance(found, dict):
            return found
    return {}


def _failed(failure: Mapping[str, Any], given: str) -> Iterator[Finding]:
    summary = str(failure.get("summary", "it is not known how"))
    where = failure.get("where") if isinstance(failure.get("where"), dict) else {}
    place = "".join(f", {key} {value}" for key, value in dict(where or {}).items())
    who = f"rank {failure.get('rank')} of {failure.get('world_size')} on {failure.get('host')}{place}"
    if any(word in summary for word in _OUT_OF_MEMORY):
        yield problem(
            "out of memory",
            f"{given}: {who}: {_quoted(summary)}",
            "# the largest size that fits, the same on all ranks:",
            "lockstep-train callbacks=auto_batch_size ...",
            "# or split a batch that does not fit, and go on:",
            "lockstep-train callbacks=auto_batch_size callbacks.auto_batch_size.on_oom=split ...",
        )
        return
    evidence = f"{given}: {who}: {_quoted(summary)}"
    yield problem("failure", evidence, f"less {given}/failure.json  # with its traceback")


def _finished(summary: Mapping[str, Any], given: str) -> Iterator[Finding]:
    metrics = summary.get("metrics")
    metrics = metrics if isinstance(metrics, dict) else {}
    shown = ", ".join(f"{name} {_short(value)}" for name, value in list(metrics.items())[:4])
    steps, ranks = summary.get("steps"), summary.get("ranks")
    yield ok("run", f"{given}: it came to its end, {steps} steps on {ranks} rank(s); {shown}")
    bad = [name for name, value in metrics.items() if not _is_finite(value)]
    if bad:
        yield problem(
            "metrics",
            f"{given}: {', '.join(bad)} is not finite",
            "lockstep-train debug=overflow ...  # which module, rank, batch",
        )


def _batch_size(machine: Machine, folder: str, given: str) -> Iterator[Finding]:
    result = _json(machine, f"{folder}/batch_size.json")
    if result is not None:
        trials = result.get("trials")
        count = len(trials) if isinstance(trials, list) else "?"
        yield ok(
            "batch size",
            f"{given}: {result.get('size')} per rank x {result.get('accumulate')} accumulated x {result.get('ranks')}"
            f" rank(s), after {count} trials ({result.get('reason')})",
        )


def _metrics(machine: Machine, folder: str, given: str) -> Iterator[Finding]:
    """The first row of the CSV log with a loss that is not finite, where no report says more."""
    if _reports(machine, folder):
        return
    for path in machine.glob(f"{folder}/csv/metrics.csv"):
        lines = (machine.read_text(path) or "").splitlines()
        heads = lines[0].split(",") if lines else []
        for line in lines[1:]:
            row = dict(zip(heads, line.split(","), strict=False))
            bad = [name for name, value in row.items() if "loss" in name and value and not _is_finite(value)]
            if bad:
                yield problem(
                    "metrics",
                    f"{given}: {bad[0]} is {row[bad[0]]} at step {row.get('step', '?')}; nothing looked for its origin",
                    "lockstep-train debug=overflow ...  # which module, rank and batch",
                )
                return


def _unknown(machine: Machine, folder: str, given: str) -> Finding:
    files = [path for pattern in ("*", "*/*") for path in machine.glob(f"{folder}/{pattern}")]
    newest = (
        max((_age(path) for path in files), default=-math.inf, key=lambda age: -age) if files else math.inf
    )
    if newest < _QUIET:
        return ok(
            "run",
            f"{given}: no summary yet, and it was written to {newest:.0f} s ago: it may still be running",
        )
    return warning(
        "run",
        f"{given}: neither a summary nor a record of a failure: it was killed from outside (memory, time limit, a lost"
        " host), or ended before its first step",
        "dmesg | grep -i 'out of memory'   # and what the scheduler says of the job: sacct -j JOB",
    )


def _age(path: str) -> float:
    try:
        return time.time() - Path(path).stat().st_mtime
    except OSError:
        return math.inf


def _checkpoints(machine: Machine, folder: str, given: str, *, finished: bool) -> Iterator[Finding]:
    found = [*machine.glob(f"{folder}/checkpoints/*.ckpt"), *machine.glob(f"{folder}/*.ckpt")]
    if finished:
        return
    if not found:
        yield not_applicable("checkpoints", f"{given}: none was saved; the run can only begin afresh")
        return
    newest = min(found, key=_age)
    yield Finding(
        Status.OK,
        "checkpoints",
        f"{given}: {len(found)}, the newest is {PurePath(newest).name}; the run can go on from it",
        (f"lockstep-train ckpt_path={given} ...  # with the arguments of that run",),
    )


def _json(machine: Machine, path: str) -> dict[str, Any] | None:
    try:
        found = json.loads(machine.read_text(path) or "null")
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_finite(value: object) -> bool:
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return str(value).strip("'\"").lower() not in ("nan", "inf", "-inf")


def _quoted(text: str) -> str:
    shown = re.sub(r"\n{2,}", "\n", text.strip())
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST].rstrip()} ..."
