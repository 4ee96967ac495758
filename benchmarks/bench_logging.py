"""What an in-order log call costs its caller, and when its lines are printed: ours over Accelerate's."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

from benchmarks.engine import Comparison, Report, Samples
from tests.helpers import run_ranks

PEER, OURS = "Accelerate in_order", "get_logger in_order"
# After a call the ranks rest until its lines are printed, so that the benchmark does not disturb itself [s].
PAUSE = 0.001


class Recorder(logging.Handler):
    """Notes when each line is printed; writes to a file as a console would be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.sink = open("/dev/null", "w")  # noqa: SIM115

    def emit(self, record: logging.LogRecord) -> None:
        self.sink.write(self.format(record) + "\n")
        self.sink.flush()
        self.times.append(time.monotonic())


def in_rank(rounds: int, calls: int) -> dict[str, Any]:
    """Measure both in turn on this rank; every rank runs this."""
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.logging import get_logger as accelerate_logger

    from lightning_lockstep.distributed import current_communicator
    from lightning_lockstep.logs import get_logger

    PartialState(cpu=True)
    communicator = current_communicator()
    communicator.side_channel.flush()
    logging.getLogger().setLevel(logging.WARNING)
    loggers, recorders = {}, {}
    for name, make in ((PEER, accelerate_logger), (OURS, get_logger)):
        plain = logging.getLogger(name)
        plain.propagate = False
        plain.addHandler(recorder := Recorder())
        loggers[name], recorders[name] = make(name, "INFO"), recorder
    cost: Samples = {PEER: [], OURS: []}
    printed: Samples = {PEER: [], OURS: []}
    rank = dist.get_rank()
    for number in range(rounds + 2):
        for name in (PEER, OURS) if number % 2 else (OURS, PEER):
            spent, waits = [], []
            for call in range(calls):
                recorders[name].times.clear()
                dist.barrier()
                before = time.monotonic()
                loggers[name].info("rank %d says %d", rank, call, in_order=True)
                after = time.monotonic()
                spent.append(after - before)
                wanted = (dist.get_world_size() if rank == 0 else 0) if name == OURS else 1
                time.sleep(PAUSE)
                while len(recorders[name].times) < wanted:
                    time.sleep(PAUSE)
                times: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(times, (before, max(recorders[name].times, default=0.0)))
                waits.append(max(t for _, t in times) - max(b for b, _ in times))
            if number >= 2:
                cost[name].append(statistics.median(spent))
                printed[name].append(statistics.median(waits))
    return {"cost": cost, "printed": printed}


def run(quick: bool) -> Report:
    tables = []
    for ranks, goal in ((2, 0.05), (4, 0.01)):
        rounds, calls = (3, 10) if quick else (15, 25)
        env = {"OMP_NUM_THREADS": "1"}
        results = run_ranks(ranks, in_rank, rounds, calls, timeout=150, env=env)
        # A round's cost is the mean over the ranks: what the job as a whole pays for the call.
        cost = {
            name: [statistics.fmean(r["cost"][name][i] for r in results) for i in range(rounds)]
            for name in (PEER, OURS)
        }
        title = f"Cost of the call to its caller, {ranks} ranks"
        tables.append(Comparison(title, cost, peer=PEER, at_most={OURS: goal}))
        title = f"From the last rank's call to the last printed line, {ranks} ranks"
        tables.append(Comparison(title, results[0]["printed"], peer=PEER, at_most={OURS: 1.0}))
    notes = [
        "All ranks of a sample are processes of this machine, 1 thread each; they call together, after a barrier,"
        " and rest until the lines are printed.",
        "When one rank calls alone, Accelerate's call blocks until the process group's timeout; ours returns"
        " as above and the line is printed after order_timeout with the missing ranks named.",
    ]
    return Report("In-order logging over Accelerate's", tables, notes)
