"""The hosts that ``--hosts`` and ``--hostfile`` name."""

from __future__ import annotations

from pathlib import Path

from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.mpirun.hostfile import Host, checked_hosts, read_hostfile

__all__ = ["hosts_of"]


def hosts_of(options: CheckOptions) -> list[Host]:
    """Return the hosts that a user has named; none for this host alone.

    Args:
        options: What the user has asked.

    Raises:
        ConfigurationError: There is no such file, or something else where a host's name should be.
    """
    hosts = [Host(name) for name in options.hosts]
    if options.hostfile is not None:
        path = Path(options.hostfile)
        if not path.is_file():
            raise ConfigurationError(
                f"--hostfile {options.hostfile}: there is no such file. Expected one host per line, such as"
                " 'node1 slots=4' (Open MPI) or 'node1:4' (MPICH)."
            )
        hosts += read_hostfile(path)
    try:
        return checked_hosts(hosts, f"--hostfile {options.hostfile}" if options.hostfile else "--hosts")
    except LaunchError as error:
        raise ConfigurationError(str(error)) from error
