"""Runs pieces of code, each in a process of its own, and writes down how each ended and what it printed."""

import atexit
import json
import os
import sys
import time
from pathlib import Path

from lightning_lockstep.distributed.failure import process_exit, record

FOLDER, LIMIT = Path(sys.argv[1]), float(sys.argv[2])
NAMES = {"atexit": atexit, "process_exit": process_exit, "record": record}


def start(name):
    """Fork; the new process returns, with its output in files, and goes on to the code."""
    pid = os.fork()
    if pid == 0:
        for number, stream in ((1, "out"), (2, "err")):
            os.dup2(os.open(FOLDER / f"{name}.{stream}", os.O_WRONLY | os.O_CREAT, 0o600), number)
        (FOLDER / name).mkdir()
        os.chdir(FOLDER / name)
        os.environ["FOLDER"] = str(FOLDER / name)
    return pid


def returncodes(running):
    """Wait for the processes, and give the return code of each; ``None`` for one that had to be killed."""
    codes, end = {}, time.monotonic() + LIMIT
    while running:
        for pid, name in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done or time.monotonic() > end:
                del running[pid]
                codes[name] = os.waitstatus_to_exitcode(status) if done else None
                if not done:
                    os.kill(pid, 9)
                    os.waitpid(pid, 0)
        time.sleep(0.01)
    return codes


running, pid = {}, 1
for name, code in json.loads((FOLDER / "codes.json").read_text()).items():  # noqa: B007 (used by the new process)
    if pid := start(name):
        running[pid] = name
    else:
        break
if pid:
    (FOLDER / "returncodes.json").write_text(json.dumps(returncodes(running)))
else:
    exec(compile(code, name, "exec"), {"__name__": "__main__", **NAMES})
