"""A rank of four is killed: ours goes on, torchrun begins again at a checkpoint, torchft goes on if it is installed."""

from __future__ import annotations

import importlib.util
import os
import statistics
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
from tests.harness import chosen_device, run_ranks

PROGRAM = Path(__file__).with_name("_recovery_train.py")
KILLS = {"2@80": "rank 2", "0@80": "rank 0"}
LIMIT = 400.0  # seconds for a run, after which it counts as one that does not go on
# By default the ranks of the next attempt meet at the store of the last one. There gloo finds addresses of processes
# that have ended, and waits for them for up to 30 minutes: https://github.com/pytorch/pytorch/issues/135712
OF_TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


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


def train(mode: str, kills: str = "", width: int = 1024, where: str = "forward") -> Run:
    """Run the program once."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        paths = os.pathsep.join(filter(None, (str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"KILLS": kills, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        environment |= {"WIDTH": str(width), "WHERE": where}
        command = [sys.executable, str(PROGRAM), mode, name]
        if mode == "torchrun":
            environment |= OF_TORCHRUN
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
        made = int(kills.rpartition("@")[2] or 0) + (where == "queued")
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
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, quorum_tick_ms=100, join_timeout_ms=10_000)
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


def nccl_again(times: int) -> list[float]:
    """Abort the communicator of one rank and make another, so many times; seconds of each."""
    import torch.distributed as dist

    took, aborted, tensor = [], 0.0, torch.ones(1 << 20, device="cuda")
    for number in range(times + 1):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        if number:
            took.append(time.perf_counter() - aborted)
        aborted = time.perf_counter()
        dist.distributed_c10d._abort_process_group()
    return took


def on_a_card() -> Report:
    """Four ranks share a card, over gloo: what a loss leaves there, which is refused as yet."""
    print("undisturbed", flush=True)
    weights, rows = train("ours").weights, []
    for kill, killed in KILLS.items():
        for where in ("backward", "queued"):
            print(f"{killed} killed, {where}", flush=True)
            one = train("ours", kill, where=where)
            rows.append([killed, where, f"{one.away:.2f}", str(one.repeated), _difference([one.weights], weights)])
    columns = ["killed", "where", "to the next step [s]", "steps made again", "weights at the end"]
    again = run_ranks(1, nccl_again, 5, backend=None, timeout=60)[0]
    return Report(
        "A rank is killed, 4 ranks that share a card",
        [
            Table("what is left", columns, rows),
            Table(
                "nccl, one rank: from an abort to the next all-reduce [s]",
                ["each"],
                [[f"{s:.3f}"] for s in again],
            ),
        ],
        ["`queued`: behind the call of the optimizer's step, which the device has not made yet."],
    )


def run(quick: bool) -> Report:
    """Each kill under each, in turn."""
    if chosen_device() == "cuda":
        return on_a_card()
    undisturbed = {}
    for mode in modes():
        print(f"{mode}, undisturbed", flush=True)
        undisturbed[mode] = train(mode)
    comparisons, rows = [], []
    for kill, killed in list(KILLS.items())[: 1 if quick else 2]:
        found: dict[str, list[Run]] = {mode: [] for mode in modes()}
        for _ in range(1 if quick else 3):
            for mode, runs in found.items():
                print(f"{mode}, {killed} killed", flush=True)
                runs.append(train(mode, kill))
        title = f"{killed} killed in step 80: from the kill to the next step"
        seconds = {mode: [one.away for one in runs] for mode, runs in found.items()}
        comparisons.append(Comparison(title, seconds, "torchrun", unit="s", scale=1.0))
        for mode, runs in found.items():
            weights = undisturbed[mode].weights
            again = " and ".join(sorted({str(one.repeated) for one in runs}))
            rows.append([killed, mode, again, _difference([one.weights for one in runs], weights)])
    away = [train("ours", kill, width=3100).away for kill in KILLS for _ in range(1 if quick else 3)]
    return Report(
        "A rank is killed: seconds until the fit goes on, 4 ranks",
        [
            *comparisons,
            Table("What was lost", ["killed", "with", "steps made again", "weights at the end"], rows),
            Table(
                "A network of 9.8 M parameters, with ours: from the kill to the next step [s]",
                ["median", "most", "kills"],
                [[f"{statistics.median(away):.2f}", f"{max(away):.2f}", str(len(away))]],
            ),
        ],
        notes=[
            "200 steps of a network of 1.1 M parameters, `benchmarks/_recovery_train.py`. `torchrun` saves every 50"
            " steps and has `--max-restarts=3`; `ours` and `torchft` go on with three ranks, from memory.",
            "Weights at the end: the largest difference from the undisturbed run of the same kind, as a share of"
            " the largest weight.",
            "`torchrun` has TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Without it two runs of two did not go on: the ranks"
            " that it had started again waited in gloo's constructor until they were ended.",
            "`torchft` is its nightly build of 2026-10-26 with the settings of its README; in its release 0.2.0"
            " all ranks end with an AssertionError after the kill.",
            f"A run that made no further step within {LIMIT:.0f} s counts as {LIMIT:.0f} s.",
        ],
    )


def _difference(ends: list[torch.Tensor | None], whole: torch.Tensor | None) -> str:
    """How far the weights of runs are from those of an undisturbed run."""
    differences = [
        float((weights - whole).abs().max() / whole.abs().max())
        for weights in ends
        if weights is not None and whole is not None
    ]
    if len(differences) < len(ends):
        return f"{len(ends) - len(differences)} of {len(ends)} runs did not come to their end"
    return f"{max(differences):.1g}"
