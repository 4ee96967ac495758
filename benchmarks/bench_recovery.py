"""A rank of four is killed: ours goes on, torchrun begins again at a checkpoint, torchft goes on if it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import Comparison, Report, Table

PROGRAM = Path(__file__).with_name("_recovery_train.py")
KILLS = {"2@80": "rank 2", "0@80": "rank 0"}
LIMIT = 120.0  # seconds for a run, after which it counts as one that does not go on
ROUNDS = 3


@dataclass(frozen=True)
class Run:
    """What came of one run."""

    # Seconds since the epoch, number and loss of each step, as they were made.
    steps: list[tuple[float, int, float]]
    died: float  # when the rank was killed [s since the epoch]; 0: none was
    made: int  # steps that were made before
    weights: torch.Tensor | None  # at the end

    @property
    def away(self) -> float:
        """Seconds from the kill to the first step that had not been made before."""
        return next((at - self.died for at, step, _ in self.steps if step > self.made), LIMIT)

    @property
    def repeated(self) -> int:
        """Steps that were made more than once."""
        return len(self.steps) - len({step for _, step, _ in self.steps})


def train(mode: str, kills: str = "") -> Run:
    """Run the program once."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        paths = os.pathsep.join(filter(None, (str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"KILLS": kills, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, str(PROGRAM), mode, name]
        if mode == "torchrun":
            runs = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command = [*runs, "--nproc-per-node=4", "--max-restarts=3", *command[1:]]
        with open(folder / "log", "w") as log:
            if mode == "torchft":
                _with_torchft(command, environment, log)
            else:
                _ended([_start(command, environment, log)])
        lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
        steps = [(float(at), int(step), float(loss)) for at, step, loss in map(str.split, lines)]
        died = folder / (kills or "none")
        whole = folder / "weights.pt"
        weights = torch.cat([one.flatten() for one in torch.load(whole).values()]) if whole.exists() else None
        made = int(kills.rpartition("@")[2] or 0)
        return Run(steps, float(died.read_text()) if died.exists() else 0.0, made, weights)


def _start(command: list[str], environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        cwd=Path(log.name).parent,
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _ended(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait for the end of all, and end those that take too long."""
    deadline = time.monotonic() + LIMIT
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        process.terminate()  # torchrun then ends its ranks, which are in sessions of their own
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
        process.kill()


def _with_torchft(command: list[str], environment: dict[str, str], log: Any) -> None:
    """Start four processes of torchft, each a replica of its own, as its README does it."""
    from torch.distributed import TCPStore
    from torchft.coordination import LighthouseServer

    # The settings of its README.
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000
    )
    stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(4)]
    own = {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "RANK": "0", "WORLD_SIZE": "1"}
    places = [{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)} for store in stores]
    _ended(
        [
            _start(command, environment | own | place | {"REPLICA_GROUP_ID": str(number)}, log)
            for number, place in enumerate(places)
        ]
    )
    lighthouse.shutdown()


def modes() -> list[str]:
    """What can be run here."""
    return ["torchrun", "ours", *(["torchft"] if importlib.util.find_spec("torchft") else [])]


def run(quick: bool) -> Report:
    """Each kill under each, in turn."""
    kills, rounds = list(KILLS)[: 1 if quick else 2], 1 if quick else ROUNDS
    undisturbed = {}
    for mode in modes():
        print(f"{mode}, undisturbed", flush=True)
        undisturbed[mode] = train(mode)
    comparisons, rows = [], []
    for kill in kills:
        seen: dict[str, list[Run]] = {mode: [] for mode in modes()}
        for number in range(rounds):
            for mode in modes():
                print(f"{kill}, round {number + 1}/{rounds}: {mode}", flush=True)
                seen[mode].append(train(mode, kill))
        comparisons.append(
            Comparison(
                f"{KILLS[kill]} killed in step 80: from the kill to the next step",
                {mode: [one.away for one in found] for mode, found in seen.items()},
                "torchrun",
                unit="s",
                scale=1.0,
            )
        )
        rows += [[KILLS[kill], mode, *_told(found, undisturbed[mode])] for mode, found in seen.items()]
    return Report(
        "A rank is killed: seconds until the fit goes on, 4 ranks",
        [
            *comparisons,
            Table("What was lost", ["killed", "with", "steps made again", "weights at the end"], rows),
        ],
        notes=[
            "200 steps of a network of 1.1 M parameters, `benchmarks/_recovery_train.py`. `torchrun` saves every 50"
            " steps and has `--max-restarts=3`; `ours` and `torchft` go on with three ranks, from memory.",
            "Weights at the end: the largest difference from the undisturbed run of the same kind, as a share of"
            " the largest weight.",
            f"A run that made no further step within {LIMIT:.0f} s counts as {LIMIT:.0f} s.",
        ],
    )


def _told(found: list[Run], undisturbed: Run) -> list[str]:
    """Steps made again, and how far the weights are from those of an undisturbed run."""
    again = sorted(one.repeated for one in found)
    whole = undisturbed.weights
    if whole is None or any(one.weights is None for one in found):
        off = f"{sum(one.weights is None for one in found)} of {len(found)} runs did not come to an end"
    else:
        off = f"{max(_off(one.weights, whole) for one in found):.1g}"
    return [f"{again[0]} to {again[-1]}" if again[0] != again[-1] else f"{again[0]}", off]


def _off(weights: Any, whole: torch.Tensor) -> float:
    return float((weights - whole).abs().max() / whole.abs().max())
