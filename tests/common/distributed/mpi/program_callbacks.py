"""Ends while a callback is under way; with --no-thread the callback starts another operation when no thread starts."""

import atexit
import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.common.distributed.mpi.ranks_meet import meet


def refuse(thread):
    """Do as Thread.start does from Python 3.12 on, once the main thread has ended."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def main():
    rank, _ = meet()
    argument = sys.argv[2]

    def late(future):
        time.sleep(1)
        result = future.value()[0]
        if argument == "--no-thread":
            result = dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0]
        Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(result.tolist()))

    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.get_future().then(late)
    work.wait()
    if argument == "--destroy":
        dist.destroy_process_group()
    if argument == "--no-thread":
        atexit.register(setattr, threading.Thread, "start", refuse)


if __name__ == "__main__":
    main()
