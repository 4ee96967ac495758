"""Run many small programs, each in a fork of this process, which has imported what they all need.

python forks.py JOBS.json MODULE...    prints a line of JSON for each job: its exit code, what it printed, its seconds

A job is what stands behind ``python`` (a file, or ``-m`` and a module, with arguments) and the folder it runs in.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import os
import runpy
import sys
import tempfile
import time
import traceback
from types import ModuleType
from typing import Any


def become(arguments: list[str], folder: str, output: int) -> None:
    """Run a program in this fork as the interpreter would."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    first, *others = arguments
    if first == "-m":
        sys.path[0], sys.argv = folder, others
        runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
    else:
        main.__file__ = first = os.path.join(folder, first)
        sys.path[0], sys.argv = os.path.dirname(first), [first, *others]
        with open(first, "rb") as file:
            exec(compile(file.read(), first, "exec"), vars(main))


def run(arguments: list[str], folder: str) -> dict[str, Any]:
    """Run a job to its end, and what it has started with it."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                become(arguments, folder, output.fileno())
            except SystemExit:
                raise
            except BaseException:
                traceback.print_exc()
                sys.exit(1)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"code": os.waitstatus_to_exitcode(status), "output": text, "seconds": time.monotonic() - started}


def main() -> None:
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # a fork that ends would copy all of it to look through it
    for job in jobs:
        print(json.dumps(run(**job)), flush=True)


if __name__ == "__main__":
    main()
