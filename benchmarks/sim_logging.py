"""1,000 ranks log in order through one store: the load on rank 0 with and without merging on each node.

    python -m benchmarks.sim_logging [--ranks 1000] [--per-node 8] [--calls 20]

All ranks are played by this process, over a real TCP store: each posts its line by a real push, and lines are
merged on each node's first rank and ordered on rank 0 as in a real run. What is counted is what rank 0 would
have to receive.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta

from torch.distributed import TCPStore

from lightning_lockstep.logs.lines import CallSite, Line
from lightning_lockstep.logs.ordering import LineOrdering

STEP_TIMEOUT = timedelta(seconds=60)


def lines_of(call: int, ranks: int, same: bool) -> list[Line]:
    site = CallSite("train", 20, "/job/train.py", 40 + call, 0)
    return [
        Line(
            site,
            (rank,),
            (f"node{rank // 8}",),
            f"step {call} done" if same else f"loss {rank / 7:.4f}",
            0.0,
        )
        for rank in range(ranks)
    ]


def simulate(
    store: TCPStore, *, ranks: int, per_node: int, calls: int, same: bool, merge: bool
) -> dict[str, float]:
    ordering = LineOrdering(range(ranks))
    messages = size = printed = 0
    busy = 0.0
    for call in range(calls):
        for start in range(0, ranks, per_node):
            node = lines_of(call, ranks, same)[start : start + per_node]
            batches = [node]
            if not merge or start == 0:
                batches = [[line] for line in node]  # the ranks of rank 0's own node post to it directly
            else:
                merger = LineOrdering(range(start, start + len(node)))
                for line in node:
                    ready = merger.add(line, 0.0)
                batches = [list(batch.lines) for batch in ready]
            for batch in batches:
                store.queue_push("mail/0", json.dumps(["log/lines", start, batch]))
                messages += 1
        began = time.perf_counter()
        while store.queue_len("mail/0"):
            data = bytes(store.queue_pop("mail/0"))
            size += len(data)
            for packed in json.loads(data)[2]:
                printed += sum(len(out.lines) for out in ordering.add(Line.unpack(packed), 0.0))
        busy += time.perf_counter() - began
    return {
        "messages": messages / calls,
        "KiB": size / calls / 1024,
        "ms": busy / calls * 1000,
        "printed": printed / calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--calls", type=int, default=20)
    given = parser.parse_args()
    store = TCPStore("127.0.0.1", 0, None, True, STEP_TIMEOUT, wait_for_workers=False)
    print(f"{given.ranks} ranks, {given.per_node} a node; a call of all ranks puts on rank 0:")
    print("lines      merged   messages      KiB   ms busy   lines printed")
    for same in (True, False):
        for merge in (False, True):
            load = simulate(
                store, ranks=given.ranks, per_node=given.per_node, calls=given.calls, same=same, merge=merge
            )
            print(
                f"{'equal' if same else 'different':<10} {'yes' if merge else 'no':<6}"
                f" {load['messages']:>10.0f} {load['KiB']:>8.1f} {load['ms']:>9.1f} {load['printed']:>15.0f}"
            )


if __name__ == "__main__":
    main()
