"""Lines that install packages of a machine's system."""

from __future__ import annotations

from lightning_lockstep.doctor.machines.machine import Machine

__all__ = ["has_dnf", "system_install"]


def has_dnf(machine: Machine) -> bool:
    """Return whether a system has packages of Red Hat's kind, rather than Debian's."""
    return machine.which("apt-get") is None and machine.which("dnf") is not None


def system_install(machine: Machine, debian: str, red_hat: str) -> str:
    """Return the line that installs packages."""
    return f"sudo dnf install {red_hat}" if has_dnf(machine) else f"sudo apt-get install {debian}"
