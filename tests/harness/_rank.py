"""What each process of ``run_ranks`` runs: the caller's function, between init and destroy of a process group.

``python _rank.py FOLDER``: the folder has the call, and gets what the function returns or raises.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Call the function as the rank that the environment tells."""
    import torch
    import torch.distributed as dist

    from tests.harness._protocol import STACK_SIGNAL, Call

    own = Path(sys.argv[1], f"rank{os.environ['RANK']}")
    sys.argv = [own.name]
    stacks = own.with_suffix(".stack").open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    # Ranks share a few cores: without this each would start as many threads as there are cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    call: Call = pickle.loads(own.with_name("call").read_bytes())
    sys.path[:] = call.sys_path
    try:
        function, args = pickle.loads(call.function)
        if call.backend is not None:
            dist.init_process_group(call.backend, timeout=datetime.timedelta(seconds=call.timeout))
        value = function(*args)
        # Not in a finally: after a failure nothing may wait for a peer that is gone.
        if call.backend is not None and dist.is_initialized():
            dist.destroy_process_group()
        write(own.with_suffix(".value"), value)
    except Exception as error:
        write(own.with_suffix(".error"), (f"{type(error).__name__}: {error}", traceback.format_exc()))
        sys.exit(1)


def write(path: Path, content: Any) -> None:
    """Write a file so that a reader sees all of it or nothing."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(pickle.dumps(content))
    part.replace(path)


if __name__ == "__main__":
    main()
