"""NVIDIA's driver and GPUs, as nvidia-smi shows them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.cuda.versions import release
from lightning_lockstep.doctor.machines.machine import Machine, Probed
from lightning_lockstep.doctor.machines.pci import pci_devices

__all__ = ["Driver", "Gpu", "architectures", "driver", "find_gpus", "with_capabilities"]

# In WSL it is not on PATH everywhere.
_PROGRAMS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_FIELDS = (
    "index",
    "name",
    "memory.total",
    "compute_cap",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "pcie.link.width.current",
    "pci.bus_id",
)
# What an old driver knows too.
_FEW_FIELDS = ("index", "name", "memory.total")
_NVIDIA, _DISPLAYS = "0x10de", "0x03"
_SHOWN = 200


@dataclass(frozen=True)
class Driver:
    program: str | None  # nvidia-smi, None if it was not found
    version: str = ""  # such as ``570.86.15``, empty if unknown
    cuda: str = ""  # newest CUDA that it can run, such as ``12.8``, empty if unknown
    error: str = ""  # of nvidia-smi if it cannot reach the driver
    has_hardware: bool = False  # an NVIDIA GPU is plugged in, whether or not there is a driver


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory: int = 0  # in all [MiB]; 0 if unknown
    capability: tuple[int, ...] = ()  # such as ``(8, 6)``; empty if unknown
    clock: int = 0  # the highest [MHz]; 0 if unknown
    link: str = ""  # PCIe generation and lanes that it could have, such as ``4x16``; empty if unknown
    lanes: int = 0  # of PCIe, now; 0 if unknown
    bus_id: str = ""  # such as ``00000000:3b:00.0``


def driver(machine: Machine) -> Driver:
    program = next((path for name in _PROGRAMS if (path := machine.which(name))), None)
    has_hardware = _has_hardware(machine)
    if program is None:
        return Driver(None, _version_of_module(machine), has_hardware=has_hardware)
    done = machine.run([program])
    version = re.search(r"Driver Version:\s*([\d.]+)", done.output)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", done.output)
    error = ""
    if not done.succeeded or version is None:
        printed = " ".join(f"{done.output} {done.error}".split())[:_SHOWN]
        how = "it did not answer in time" if done.timed_out else exit_in_words(done.returncode)
        error = printed or f"{how}, no output"
    return Driver(program, version[1] if version else "", cuda[1] if cuda else "", error, has_hardware)


def find_gpus(machine: Machine) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, none if it cannot."""
    program = next((path for name in _PROGRAMS if (path := machine.which(name))), None)
    if program is None:
        return []
    for fields in (_FIELDS, _FEW_FIELDS):
        done = machine.run([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if done.succeeded and (found := _rows(done.output, fields)):
            return found
    return []


def with_capabilities(gpus: Sequence[Gpu], probed: Probed) -> list[Gpu]:
    """Return GPUs with the compute capabilities that torch knows, where nvidia-smi is too old to list them."""
    devices = probed.facts.get("devices")  # of the probe ``torch_devices``
    known = [_capability_of(device) for device in devices] if isinstance(devices, list) else []
    if len(known) != len(gpus):
        return list(gpus)
    return [
        replace(gpu, capability=gpu.capability or capability)
        for gpu, capability in zip(gpus, known, strict=True)
    ]


def _capability_of(device: object) -> tuple[int, ...]:
    given = device.get("capability") if isinstance(device, dict) else None
    is_pair = isinstance(given, list) and len(given) == 2 and all(isinstance(part, int) for part in given)
    return tuple(given) if given is not None and is_pair else ()


def architectures(found: Sequence[Gpu]) -> str:
    """Return ``TORCH_CUDA_ARCH_LIST`` for some GPUs, such as ``8.6;9.0``; empty if none is known."""
    kinds = sorted({gpu.capability for gpu in found if len(gpu.capability) == 2})
    return ";".join(f"{major}.{minor}" for major, minor in kinds)


def _rows(output: str, fields: Sequence[str]) -> list[Gpu]:
    rows = []
    for cells in csv.reader(output.replace("\0", "").splitlines()):
        values = dict(zip(fields, (cell.strip() for cell in cells), strict=False))
        if len(values) == len(fields) and values["index"].isascii() and values["index"].isdigit():
            rows.append(_gpu(values))
    return rows


def _gpu(values: dict[str, str]) -> Gpu:
    generation, lanes = values.get("pcie.link.gen.max", ""), values.get("pcie.link.width.max", "")
    capability = release(values.get("compute_cap"))
    return Gpu(
        index=_number(values["index"]),
        name=values["name"],
        memory=_number(values["memory.total"]),
        capability=capability if len(capability) == 2 else (),
        clock=_number(values.get("clocks.max.sm", "")),
        link=f"{generation}x{lanes}" if _number(generation) and _number(lanes) else "",
        lanes=_number(values.get("pcie.link.width.current", "")),
        bus_id=values.get("pci.bus_id", ""),
    )


def _number(text: str) -> int:
    numbers = release(text)
    return numbers[0] if numbers else 0


def _version_of_module(machine: Machine) -> str:
    match = re.search(r"Kernel Module\D*([\d.]+)", machine.read_text("/proc/driver/nvidia/version") or "")
    return match[1] if match else ""


def _has_hardware(machine: Machine) -> bool:
    kinds = ((machine.read_text(f"{folder}/class") or "").strip() for folder in pci_devices(machine, _NVIDIA))
    return any(kind.startswith(_DISPLAYS) for kind in kinds)
