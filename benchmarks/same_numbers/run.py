"""Runs many programs in few groups of ranks, and makes a program that fails small."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.same_numbers.fit import Job, Outcome, run_jobs
from benchmarks.same_numbers.judge import Order, Part, Verdict, judge
from benchmarks.same_numbers.program import DRAWN, STOCK, Program, impossible, simpler
from tests.harness import run_ranks_raw
from tests.harness.patience import patience
from tests.models.distributed.mpi.launch import run_mpi_raw

#: A program that takes longer hangs [s].
LIMIT = 40.0
#: Programs that a group of ranks runs, unless one fails.
AT_ONCE = 40
# Simpler programs that are tried together.
_AT_A_TRY = 6


@dataclass(frozen=True)
class Result:
    """A program and what came of it."""

    program: Program
    verdict: Verdict

    @property
    def kind(self) -> str:
        """``right``, ``refused``, or the kind of the first difference."""
        differences = self.verdict.differences
        return differences[0].partition(":")[0] if differences else "refused" if self.verdict.refused else "right"


def check(programs: Sequence[Program], at_a_time: int = 1) -> list[Result]:
    """Run programs and judge each."""
    folder = tempfile.mkdtemp(prefix="same-numbers-")
    try:
        first = [job for number, one in enumerate(programs) for job in _first_jobs(f"{number}", one)]
        _run(first, folder, at_a_time)
        resumed = [
            Job(f"{number}-resumed", one.on(one.resume_ranks), resumes=True)
            for number, one in enumerate(programs)
            if one.stop and Path(folder, f"{number}.ckpt").exists()
        ]
        _run(resumed, folder, at_a_time)
        return [_result(f"{number}", one, folder) for number, one in enumerate(programs)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_jobs(name: str, program: Program) -> list[Job]:
    jobs = [Job(f"{name}-first", program)]
    if _runs_alone(program):
        # The order of one rank, without what would hide a sample, and what it comes to.
        alone = dataclasses.replace(
            program.on(1),
            corrupt=(),
            strategy="ddp" if program.strategy != STOCK else STOCK,
            stop=0,
            resume_ranks=0,
            loss=program.loss if program.real or program.loss == "manual" else "mean",
        )
        jobs.append(Job(f"{name}-alone", alone))
    return jobs


def _runs_alone(program: Program) -> bool:
    """Return whether a program runs on one rank, too: for an order that is drawn, or numbers that are."""
    return program.order in DRAWN or program.real


def _result(name: str, program: Program, folder: str) -> Result:
    def part(suffix: str, told: str, ranks: int) -> Part:
        return Part(told, [_outcome(folder, f"{name}-{suffix}", rank) for rank in range(ranks)])

    order: Order | None = None
    parts = [part("first", "before the stop" if program.stop else "whole", program.ranks)]
    if _runs_alone(program):
        parts.append(part("alone", "on one rank", 1))
    if program.order in DRAWN:
        seen = parts[-1].outcomes[0].seen
        order = [[numbers for n, _, numbers in seen if n == epoch] for epoch in range(program.epochs)]
    if program.stop and not any(one.error for one in parts[0].outcomes):
        parts.append(part("resumed", "resumed", program.resume_ranks))
    return Result(program, judge(program, parts, order))


def _outcome(folder: str, name: str, rank: int) -> Outcome:
    file = Path(folder, f"{name}.{rank}.pkl")
    return pickle.loads(file.read_bytes()) if file.exists() else Outcome(error="it did not run")


def _run(jobs: Sequence[Job], folder: str, at_a_time: int) -> None:
    groups: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        kind = "zero" if job.program.strategy.startswith("zero") else job.program.strategy
        groups.setdefault((job.program.ranks, kind), []).append(job)
    launches = [many[n : n + AT_ONCE] for many in groups.values() for n in range(0, len(many), AT_ONCE)]
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(lambda many: _run_group(many, folder), launches))


def _run_group(jobs: list[Job], folder: str) -> None:
    """Run jobs on one group of ranks; where one fails, the others run on a new one."""
    while jobs:
        ranks = jobs[0].program.ranks
        said = _launch(jobs, folder)
        done = [not any(_outcome(folder, job.name, rank).fatal for rank in range(ranks)) for job in jobs]
        failed = done.index(False) if False in done else len(jobs)
        # A rank may have gone on to what comes after the job that failed.
        for job in jobs[failed + 1 :]:
            for file in Path(folder).glob(f"{job.name}.*.pkl"):
                file.unlink()
        for rank in range(ranks) if failed < len(jobs) else ():
            file = Path(folder, f"{jobs[failed].name}.{rank}.pkl")
            if not file.exists():
                file.write_bytes(pickle.dumps(Outcome(error=f"it did not end: {said.get(rank, '')[-1500:]}")))
        jobs = jobs[failed + 1 :]


def _launch(jobs: list[Job], folder: str) -> dict[int, str]:
    """Start a group of ranks for jobs; return what its ranks said at their end."""
    ranks, limit = jobs[0].program.ranks, LIMIT * len(jobs) + 60
    if jobs[0].program.strategy == "mpi":
        ended, _ = run_mpi_raw(ranks, run_jobs, jobs, folder, patience(LIMIT), timeout=limit)
        return dict.fromkeys(range(ranks), ended.stderr)
    options = {"backend": None, "timeout": limit, "linger": 12.0, "allow_timeout": True}
    outcomes = run_ranks_raw(ranks, run_jobs, jobs, folder, patience(LIMIT), env={"OMP_NUM_THREADS": "1"}, **options)
    return {one.rank: one.traceback or one.stderr for one in outcomes}


def shrink(result: Result, run: Callable[[list[Program], int], list[Result]] = check) -> Result:
    """Return the simplest program found that fails in the same way."""
    while True:
        tried = [one for one in dict.fromkeys(simpler(result.program)) if impossible(one) is None]
        several = (run(tried[n : n + _AT_A_TRY], 2) for n in range(0, len(tried), _AT_A_TRY))
        found = next((one for many in several for one in many if one.kind == result.kind), None)
        if found is None:
            return result
        result = found
