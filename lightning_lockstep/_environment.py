"""The only module that reads this package's environment variables.

=========================== ===========================================================
``LOCKSTEP_LOG_LEVEL``      level name of the loggers that :func:`get_logger` makes
``LOCKSTEP_DEBUG``          ``1`` verifies collectives between ranks before they run
``LOCKSTEP_FULL_TRACEBACK`` ``1`` shows all frames of a traceback
``LOCKSTEP_JOB_TOKEN``      secret that the ranks of a job share; our launchers set it, under
                            ``srun`` and ``torchrun`` the job script may
=========================== ===========================================================

The variables that our launchers set for the ranks they start (``LOCKSTEP_RANK_*``) are private: a user
neither sets nor reads them.
"""

from __future__ import annotations

import os

from lightning_lockstep.errors import ConfigurationError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

#: The secret by which the ranks of a job know each other.
JOB_TOKEN = "LOCKSTEP_JOB_TOKEN"
#: Set by our process launcher in each rank it starts: the process id of the launching rank.
LAUNCHER_PID = "LOCKSTEP_RANK_LAUNCHER_PID"
#: Set by our mpirun launcher in each rank of its host: the folder in which a rank notes how it ended.
ENDED_FOLDER = "LOCKSTEP_RANK_ENDED_FOLDER"
#: Set by our mpirun launcher for ranks on several hosts: the configuration of the Hydra job. Gone once a rank has it.
RANK_CONFIG = "LOCKSTEP_RANK_CONFIG"


def log_level() -> str | None:
    """Return ``LOCKSTEP_LOG_LEVEL`` in upper case, or ``None`` when it is not set."""
    given = os.environ.get("LOCKSTEP_LOG_LEVEL")
    if not given:
        return None
    if given.upper() not in _LEVELS:
        raise ConfigurationError(
            f"The environment variable LOCKSTEP_LOG_LEVEL is {given!r}; expected one of {', '.join(_LEVELS)}."
        )
    return given.upper()


def debug() -> bool:
    """Return whether ``LOCKSTEP_DEBUG`` asks for verified collectives."""
    return os.environ.get("LOCKSTEP_DEBUG", "0") not in ("", "0")


def full_traceback() -> bool:
    """Return whether ``LOCKSTEP_FULL_TRACEBACK`` asks for all frames of tracebacks."""
    return os.environ.get("LOCKSTEP_FULL_TRACEBACK", "0") not in ("", "0")


def job_token() -> str | None:
    """Return the secret of this job, or ``None`` if whoever started this process has given none."""
    return os.environ.get(JOB_TOKEN) or None


def launcher_pid() -> int | None:
    """Return the process id of the rank that started this one, or ``None`` if nobody of ours did."""
    given = os.environ.get(LAUNCHER_PID)
    return int(given) if given else None


def ended_folder() -> str | None:
    """Return the folder in which this rank notes how it ended, or ``None`` if nobody asks."""
    return os.environ.get(ENDED_FOLDER)
