"""The stages of `scripts/gpu`: each has a limit, one line of outcome, and results on disk as it goes.

The folder of results gets `summary.txt`, `junit.xml`, `benchmarks.md` and a log of each stage.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[1]
_TO_END = 8.0  # seconds that a command gets to write its results after SIGINT


@dataclass(frozen=True)
class Stage:
    """A part of the run: tests by path and expression, then topics of `python -m benchmarks`, within one limit."""

    title: str
    limit: float  # seconds
    tests: tuple[str, ...] = ()
    only: str = ""  # pytest's -k
    topics: tuple[str, ...] = ()


STAGES = [
    Stage(
        "DeepSpeed over nccl, resumes by name",
        90,
        ("tests/programs/strategies/test_deepspeed.py",),
    ),
    Stage(
        "the same numbers on one and four ranks of a card",
        110,
        ("tests/ranks/steps/test_sample_training.py", "tests/variants/steps/test_sample_training.py"),
        topics=("by_sample",),
    ),
    Stage(
        "what a step costs",
        160,
        topics=("callbacks", "step", "overflow", "replica_check"),
    ),
    Stage(
        "a lost rank",
        90,
        topics=("recovery",),
    ),
    Stage(
        "batch sizes of real models",
        100,
        topics=("batch_size",),
    ),
    # With --stages, once those above have passed.
    Stage(
        "every test with a device",
        300,
        tuple(f"tests/{cost}" for cost in ("unit", "ranks", "programs")),
    ),
]

#: What fits into ten minutes.
FIRST = range(1, len(STAGES))


class Run:
    """The stages that are asked for, one after the other."""

    def __init__(self, device: str, results: Path, slow: float) -> None:
        self.device, self.results, self.slow = device, results, slow
        self.suites = ET.Element("testsuites")
        self.failed = False
        results.mkdir(parents=True, exist_ok=True)
        (results / "summary.txt").write_text("")

    def say(self, line: str) -> None:
        """Print a line, and keep it."""
        print(line, flush=True)
        with (self.results / "summary.txt").open("a") as file:
            file.write(f"{line}\n")

    def stage(self, number: int) -> None:
        """Run one stage and say how it ended."""
        stage, started = STAGES[number - 1], time.monotonic()
        ends_at = started + stage.limit * self.slow
        log = self.results / f"stage-{number}.log"
        log.write_text("")
        said = [self.tests(stage, log, ends_at)] if stage.tests else []
        for topic in stage.topics:
            half = time.monotonic() + stage.limit * self.slow / 2  # one that hangs leaves the others time
            said.append(self.topic(topic, log, min(ends_at, half)))
        took = time.monotonic() - started
        self.say(f"stage {number} of {len(STAGES)}, {stage.title}: {', '.join(said)} in {took:.0f} s")

    def tests(self, stage: Stage, log: Path, ends_at: float) -> str:
        """Run tests on the device; returns how many passed and failed, and lists those that failed."""
        one = self.results / "junit-of-stage.xml"
        workers = min(4, len(os.sched_getaffinity(0)) // 4)
        spread = f"-n{workers} --dist=loadfile" if workers else "-n0"
        limits = f"--timeout={0.7 * stage.limit * self.slow:.0f} --junitxml={one}"
        options = f"-v --tb=short -W default -p xdist.plugin -p pytest_timeout {spread} {limits}".split()
        command = [sys.executable, "-m", "pytest", "--device", self.device, *options]
        only = ("-k", stage.only) if stage.only else ()
        code = self.command([*command, *only, *stage.tests], log, ends_at)
        if one.exists():
            suites = ET.parse(one).getroot()
            one.unlink()
            self.suites.extend(suites)
            ET.ElementTree(self.suites).write(self.results / "junit.xml")
            for case in suites.iter("testcase"):
                if case.find("failure") is not None or case.find("error") is not None:
                    self.say(f"  failed: {case.get('classname')}::{case.get('name')}")
        # Of the log, which is written as it goes.
        ended = Counter(re.findall(r"(?m)^(?:\S+::.* |\[gw\d+\] .*)(PASSED|FAILED|ERROR|SKIPPED)\b", log.read_text()))
        text = ", ".join(f"{count} {kind.lower()}" for kind, count in ended.items()) or "no tests"
        return text + self.how(code, ends_at)

    def topic(self, topic: str, log: Path, ends_at: float) -> str:
        """Run a topic of the benchmarks; its tables are added to those before."""
        command = [sys.executable, "-m", "benchmarks", topic, "--device", self.device, "--quick"]
        code = self.command([*command, "--add-to", str(self.results / "benchmarks.md")], log, ends_at)
        return topic + self.how(code, ends_at)

    def how(self, code: int | None, ends_at: float) -> str:
        """Say how a command ended if not well."""
        self.failed = self.failed or code != 0
        if code is None:
            return " (not begun)"
        if time.monotonic() >= ends_at:
            return " (cut off at its limit)"
        return f" (exit code {code})" if code else ""

    def command(self, command: list[str], log: Path, ends_at: float) -> int | None:
        """Run a command until its end or its limit, with all its output in the log."""
        if time.monotonic() >= ends_at:
            return None
        # Plugins that a machine happens to have, such as pytest-benchmark, warn of what others do.
        env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("a") as file:
            file.write(f"$ {shlex.join(command)}\n")
            file.flush()
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            done = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams)
        try:
            return done.wait(ends_at - time.monotonic())
        except subprocess.TimeoutExpired:
            started = psutil.Process(done.pid).children(recursive=True)
            done.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                done.wait(_TO_END)
        done.kill()
        for process in started:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return done.wait()


def machine(device: str) -> str:
    """Say what this runs on."""
    if device == "cpu":
        return "torch sees no CUDA device here; the same runs on the CPU"
    card, version = torch.cuda.get_device_properties(0), torch.version.cuda
    return f"{torch.cuda.device_count()} x {card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {version}"


def main() -> int:
    """Run the stages."""
    listed = "\n".join(f"  {n} {stage.title}: {stage.limit:.0f} s" for n, stage in enumerate(STAGES, 1))
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=f"stages:\n{listed}"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "gpu-results", metavar="FOLDER")
    parser.add_argument("--stages", default="", metavar="1,3", help="these alone")
    parser.add_argument("--slow", type=float, default=1.0, metavar="N", help="multiplies the limits")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = Run(device, given.results.resolve(), given.slow)
    processor, cores = platform.machine(), len(os.sched_getaffinity(0))
    run.say(f"gpu: {machine(device)}; {cores} cores, {processor}, Python {platform.python_version()}")
    run.say(f"gpu: torch {torch.__version__}; results in {run.results}")
    started = time.monotonic()
    for number in map(int, re.findall(r"\d+", given.stages)) if given.stages else FIRST:
        run.stage(number)
    run.say(f"gpu: {time.monotonic() - started:.0f} s in all")
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
