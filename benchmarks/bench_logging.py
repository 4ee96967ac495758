"""What an in-order log call costs its caller, 2 ranks: ours over Accelerate's."""

from __future__ import annotations

import logging
import statistics
import time

from benchmarks.engine import Comparison, Report, Samples, interleave
from tests.harness import run_ranks

PEER, OURS = "Accelerate in_order", "get_logger in_order"
# After a call the ranks rest until its lines are printed, so that the benchmark does not disturb itself [s].
PAUSE = 0.001


class Recorder(logging.Handler):
    """Counts lines; writes to a file as a console would be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.sink = open("/dev/null", "w")  # noqa: SIM115

    def emit(self, record: logging.LogRecord) -> None:
        self.sink.write(self.format(record) + "\n")
        self.sink.flush()
        self.count += 1


def in_rank(rounds: int, calls: int) -> Samples:
    """Measure both in turn on this rank; every rank runs this."""
    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.logging import get_logger as accelerate_logger

    from lightning_lockstep.distributed import current_communicator
    from lightning_lockstep.logs.logger import get_logger

    PartialState(cpu=True)
    current_communicator().side_channel.flush()
    logging.getLogger().setLevel(logging.WARNING)
    loggers, recorders = {}, {}
    for name, make in ((PEER, accelerate_logger), (OURS, get_logger)):
        plain = logging.getLogger(name)
        plain.propagate = False
        plain.addHandler(recorder := Recorder())
        loggers[name], recorders[name] = make(name, "INFO"), recorder
    rank = dist.get_rank()

    def cost(name: str) -> float:
        spent, wanted = [], (2 if rank == 0 else 0) if name == OURS else 1
        for call in range(calls):
            recorders[name].count = 0
            dist.barrier()
            before = time.monotonic()
            loggers[name].info("rank %d says %d", rank, call, in_order=True)
            spent.append(time.monotonic() - before)
            time.sleep(PAUSE)
            while recorders[name].count < wanted:
                time.sleep(PAUSE)
        return statistics.median(spent)

    return interleave({PEER: lambda: cost(PEER), OURS: lambda: cost(OURS)}, rounds=rounds, warmup=2)


def run(quick: bool) -> Report:
    rounds, calls = (3, 10) if quick else (15, 25)
    results = run_ranks(2, in_rank, rounds, calls, timeout=150, env={"OMP_NUM_THREADS": "1"})
    # A round's cost is the mean over the ranks: what the job as a whole pays for the call.
    samples = {
        name: [statistics.fmean(pair) for pair in zip(*(of[name] for of in results), strict=True)]
        for name in (PEER, OURS)
    }
    table = Comparison("Cost of the call to its caller, 2 ranks", samples, peer=PEER, at_most={OURS: 0.05})
    notes = ["The ranks call together, after a barrier, and rest until the lines are printed."]
    return Report("In-order logging over Accelerate's", [table], notes)
