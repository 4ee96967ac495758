"""Four ranks log in order: one has another level, one is silent, one dies.

    python examples/ordered_logging.py

The console shows every line once, in rank order, with the ranks that are missing named. Each rank's own
lines are in ordered_logging/rank-N.log.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 4


def rank(number: int, rendezvous: str, folder: str) -> None:
    from lightning_lockstep import get_logger
    from lightning_lockstep.distributed import current_communicator
    from lightning_lockstep.logs import logger
    from lightning_lockstep.logs.handlers import RankFile
    from lightning_lockstep.logs.sender import sender_on

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=number, world_size=RANKS)
    logging.basicConfig(stream=sys.stdout, format="%(asctime)s %(filename)s:%(lineno)d %(message)s")
    logger.local_handlers.append(RankFile(Path(folder), number, style="text"))
    sender = sender_on(current_communicator().side_channel)
    if sender.collector is not None:
        sender.collector.configure(timeout=2.0, merging=True)
    log = get_logger("example", "DEBUG" if number == 3 else "INFO")

    log.info("only the main rank says this")
    log.info("all of us are ready", in_order=True)
    log.info("my part is %d", number * 10, in_order=True)
    log.debug("only rank 3 logs at this level", in_order=True)
    if number != 1:
        log.warning("rank 1 never says this", in_order=True)
    if number == 2:
        log.error("rank 2 is about to die", in_order=True)
        sender.channel.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    log.info("the others go on", in_order=True)
    time.sleep(3.0)
    log.info("goodbye", in_order=True)


def main() -> None:
    folder = Path("ordered_logging")
    with tempfile.TemporaryDirectory() as temporary:
        rendezvous = str(Path(temporary, "rendezvous"))
        context = mp.get_context("spawn")
        ranks = [context.Process(target=rank, args=(n, rendezvous, str(folder))) for n in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
    print("exit codes:", [process.exitcode for process in ranks])
    for path in sorted(folder.glob("rank-*.log")):
        print(f"{path}: {len(path.read_text().splitlines())} lines")


if __name__ == "__main__":
    main()
