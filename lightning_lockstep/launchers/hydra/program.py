"""Which program a Hydra job belongs to, also where a launcher of sweeps runs the job in a process of its own.

Such a process (a worker of joblib, a task of submitit) is another program than the user's: it was sent the user's
function and calls it. A further rank has to be the user's program, so it is found from that function.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FunctionType

from lightning_lockstep._doors.hydra_internals import function_of_job, is_command_line
from lightning_lockstep.errors import LaunchError

__all__ = ["program_arguments"]


def program_arguments(started_in: str) -> tuple[list[str], str | None]:
    """Return what follows the interpreter on the command line, and the folder in which it means this program."""
    function = _function_sent_here()
    if function is not None:
        return _program_of(function, started_in)
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name], started_in
    script = Path(started_in, sys.argv[0])
    if not script.is_file():
        raise LaunchError(
            f"This Hydra program cannot start further ranks: it was started as {sys.argv[0]!r}, which is"
            f" no file in {started_in}. Start it from a script or with `python -m`, or let torchrun start"
            " all ranks."
        )
    # With hydra.job.chdir rank 0 works in its run folder; so do the others.
    return [str(script)], str(Path.cwd())


def _function_sent_here() -> FunctionType | None:
    """The function of the job that runs, if it was sent to this process; ``None`` in the program itself."""
    function = None
    frame = inspect.currentframe()
    while frame is not None:
        if is_command_line(frame):
            return None
        job = function_of_job(frame)
        if job is not None:
            function = inspect.unwrap(job)
        frame = frame.f_back
    return function


def _program_of(function: FunctionType, started_in: str) -> tuple[list[str], str | None]:
    # A function that was sent by its code has no file of its own, from cloudpickle 3.1.3 on; its module has.
    module, names = function.__module__, function.__globals__
    file, package = names.get("__file__"), names.get("__package__")
    if module != "__main__":
        # A console command imports the function and calls it. The file stands for the command in messages.
        code = f"import sys; from {module} import {function.__name__} as main; sys.argv[0] = {file or module!r}; main()"
        return ["-c", code], started_in
    if file is None or not Path(file).is_file():
        raise LaunchError(
            f"This Hydra program cannot start further ranks: {function.__name__}() was sent here from {file}, which"
            " is no file on this host. Start the program from a script that every host can read."
        )
    if package is not None:  # python -m
        return ["-m", ".".join([*filter(None, [package]), Path(file).stem])], started_in
    return [file], str(Path.cwd())
