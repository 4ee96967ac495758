"""Hands the configuration of a Hydra job to ranks on other hosts, in an environment variable.

A file would have to lie in a folder that all hosts share, where others may replace it before a rank unpickles it, and
where a forced end leaves it behind. mpirun carries the variable to the ranks over its own connections.
"""

from __future__ import annotations

import base64
import sys
import zlib
from pathlib import Path

from lightning_lockstep._environment import RANK_CONFIG
from lightning_lockstep.errors import LaunchError

__all__ = ["config_for_all_hosts"]

_OPTION = "--experimental-rerun"
_MOST = 120_000  # Linux takes variables of up to 128 KiB

# Hydra's option wants a path: that of a file without a name, in the process that runs the program.
_RECEIVE = f"""
import base64, os, sys, tempfile, zlib
file = tempfile.TemporaryFile(buffering=0)
file.write(zlib.decompress(base64.b64decode(os.environ.pop({RANK_CONFIG!r}))))
file.seek(0)
os.set_inheritable(file.fileno(), True)
os.execv(sys.argv[1], [*sys.argv[1:], {_OPTION!r}, "/dev/fd/%d" % file.fileno()])
"""


def config_for_all_hosts(program: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment variables) with which a rank gets its configuration on any host."""
    if _OPTION not in program:
        return program, {}
    at = program.index(_OPTION)
    packed = base64.b64encode(zlib.compress(Path(program[at + 1]).read_bytes())).decode()
    if len(packed) > _MOST:
        raise LaunchError(
            f"The configuration of this job takes {len(packed):,} bytes when packed: expected at most {_MOST:,}, the"
            " most that ranks on other hosts can be given. Keep long lists in a file that the configuration names,"
            " or start the ranks with an mpirun of your own."
        )
    return [sys.executable, "-I", "-c", _RECEIVE, *program[:at]], {RANK_CONFIG: packed}
