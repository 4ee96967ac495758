"""The hosts that ``--hosts`` and ``--hostfile`` name."""

from __future__ import annotations

from pathlib import Path

from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.errors import ConfigurationError, LaunchError
from lightning_lockstep.launchers.mpirun.hostfile import Host, checked_hosts, is_host_name, read_hostfile

__all__ = ["hosts_of"]


def hosts_of(options: CheckOptions) -> list[Host]:
    """Return the hosts that a user has named; none for this host alone."""
    wrong = [name for name in options.hosts if not is_host_name(name)]
    if wrong:
        raise ConfigurationError(
            f"--hosts: {', '.join(map(repr, wrong))}: expected names or addresses of hosts with commas between them,"
            " such as --hosts node1,node2."
        )
    hosts = [Host(name) for name in options.hosts]
    return hosts if options.hostfile is None else hosts + _listed_in(options.hostfile)


def _listed_in(hostfile: str) -> list[Host]:
    given = f"--hostfile {hostfile}"
    if not Path(hostfile).is_file():
        raise ConfigurationError(
            f"{given}: there is no such file. Expected one host per line, such as 'node1 slots=4' (Open MPI) or"
            " 'node1:4' (MPICH)."
        )
    try:
        hosts = checked_hosts(read_hostfile(Path(hostfile)), given)
    except LaunchError as error:
        raise ConfigurationError(str(error)) from error
    if not hosts:
        raise ConfigurationError(f"{given}: it names no host. Expected one host per line.")
    return hosts
