"""Devices on the PCI bus of a machine."""

from __future__ import annotations

from lightning_lockstep.doctor.machines.machine import Machine

__all__ = ["pci_devices"]


def pci_devices(machine: Machine, vendor: str) -> list[str]:  # vendor: such as ``0x10de``
    """Return the folders in which the kernel describes the devices of a vendor."""
    files = machine.glob("/sys/bus/pci/devices/*/vendor")
    return [
        path.removesuffix("/vendor") for path in files if (machine.read_text(path) or "").strip() == vendor
    ]
