"""CUDA on this machine: what torch was built for, the driver and its GPUs, toolkits, and compilers for these."""

from __future__ import annotations

import csv
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_lockstep._text import exit_in_words, first_line
from lightning_lockstep.doctor.machine import Machine, major, pci_devices, release, short, system_install

# -- What the installed torch was built for, without importing it if that can be read --


@dataclass(frozen=True)
class TorchBuild:
    version: str  # empty if it is not installed
    cuda: str  # CUDA that it was built with, such as ``12.8``; empty without


def torch_build(machine: Machine) -> TorchBuild:
    folder = machine.python.folders.get("torch", "")
    text = machine.read_text(f"{folder}/torch/version.py") or ""
    version = _assigned(text, "__version__") or machine.python.packages.get("torch", "")
    cuda = _assigned(text, "cuda")
    if not cuda and (match := re.search(r"\+cu(\d+)(\d)\b", version)):
        cuda = f"{match[1]}.{match[2]}"
    return TorchBuild(version, cuda)


def _assigned(text: str, name: str) -> str:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"\n]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


# -- NVIDIA's driver and GPUs, as nvidia-smi shows them --

_FIELDS = ("index", "name", "memory.total", "compute_cap", "pci.bus_id")
_NVIDIA, _DISPLAYS = "0x10de", "0x03"
_SHOWN = 200


@dataclass(frozen=True)
class Driver:
    program: str | None  # nvidia-smi, None if it was not found
    has_hardware: bool  # an NVIDIA GPU is plugged in, whether or not there is a driver
    version: str = ""  # such as ``570.86.15``, empty if unknown
    cuda: str = ""  # newest CUDA that it can run, such as ``12.8``, empty if unknown
    error: str = ""  # of nvidia-smi if it cannot reach the driver


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory: int  # in all [MiB]; 0 if unknown
    capability: tuple[int, ...]  # such as ``(8, 6)``; empty if unknown
    bus_id: str  # such as ``00000000:3b:00.0``


def find_driver(machine: Machine) -> Driver:
    program = machine.which("nvidia-smi")
    kinds = [(machine.read_text(f"{folder}/class") or "").strip() for folder in pci_devices(machine, _NVIDIA)]
    has_hardware = any(kind.startswith(_DISPLAYS) for kind in kinds)
    if program is None:
        loaded = machine.read_text("/proc/driver/nvidia/version") or ""
        return Driver(None, has_hardware, _found(r"Kernel Module\D*([\d.]+)", loaded))
    done = machine.run([program])
    version = _found(r"Driver Version:\s*([\d.]+)", done.output)
    error = ""
    if not done.succeeded or not version:
        how = "it did not answer in time" if done.timed_out else exit_in_words(done.returncode)
        error = " ".join(f"{done.output} {done.error}".split())[:_SHOWN] or f"{how}, no output"
    return Driver(program, has_hardware, version, _found(r"CUDA Version:\s*([\d.]+)", done.output), error)


def find_gpus(machine: Machine) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, none if it cannot."""
    if (program := machine.which("nvidia-smi")) is None:
        return []
    done = machine.run([program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"])
    found = []
    for cells in csv.reader(done.output.replace("\0", "").splitlines() if done.succeeded else []):
        values = dict(zip(_FIELDS, (cell.strip() for cell in cells), strict=False))
        if len(values) == len(_FIELDS) and values["index"].isascii() and values["index"].isdigit():
            capability = release(values["compute_cap"])
            found.append(
                Gpu(
                    index=major(values["index"]),
                    name=values["name"],
                    memory=major(values["memory.total"]),
                    capability=capability if len(capability) == 2 else (),
                    bus_id=values["pci.bus_id"].lower(),
                )
            )
    return found


def architectures(found: Sequence[Gpu]) -> str:
    """Return ``TORCH_CUDA_ARCH_LIST`` for some GPUs, such as ``8.6;9.0``; empty if none is known."""
    return ";".join(".".join(map(str, kind)) for kind in sorted({gpu.capability for gpu in found}) if kind)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


# -- CUDA toolkits of a machine: all of them, and which one its variables find --

_PLACES = ("/usr/local/cuda*", "/opt/cuda*", "/usr/lib/cuda")
_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
_LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


@dataclass(frozen=True)
class Toolkit:
    root: str  # with links followed
    version: str  # such as ``12.8.1``; empty if its compiler reports none
    libraries: str | None  # the folder that holds ``libcudart.so``, if one does

    def __str__(self) -> str:
        return f"{self.root} ({self.version or 'of unknown version'})"


def find_toolkits(machine: Machine) -> list[Toolkit]:
    roots = [path for place in _PLACES for path in machine.glob(place)]
    roots += [path for name in _VARIABLES if (path := machine.environment.get(name, "")).startswith("/")]
    found = {
        root: _toolkit(machine, root, f"{root}/bin/nvcc")
        for root in dict.fromkeys(map(machine.real_path, roots))
        if machine.exists(f"{root}/bin/nvcc")
    }
    if (used := toolkit_in_use(machine)) is not None:
        found.setdefault(used.root, used)
    return sorted(found.values(), key=lambda toolkit: release(toolkit.version), reverse=True)


def toolkit_in_use(machine: Machine) -> Toolkit | None:
    """Return the toolkit that builds find, as torch looks for it: ``CUDA_HOME``, ``PATH``, then ``/usr/local/cuda``."""
    home = machine.environment.get("CUDA_HOME") or machine.environment.get("CUDA_PATH")
    if not home and (program := machine.which("nvcc")) is not None:
        program = machine.real_path(program)
        return _toolkit(machine, posixpath.dirname(posixpath.dirname(program)), program)
    home = home or "/usr/local/cuda"
    if not machine.exists(f"{home}/bin/nvcc"):
        return None
    root = machine.real_path(home)
    return _toolkit(machine, root, f"{root}/bin/nvcc")


def _toolkit(machine: Machine, root: str, nvcc: str) -> Toolkit:
    described = machine.read_text(f"{root}/version.json") or ""  # absent before CUDA 11
    version = _found(r'"cuda"\s*:\s*\{[^{}]*"version"\s*:\s*"(\d[\d.]*)"', described)
    if not version:
        printed = machine.run([nvcc, "--version"]).output
        version = _found(r"\bV(\d+\.\d+\.\d+)", printed) or _found(r"release (\d+\.\d+)", printed)
    folders = [f"{root}/{name}" for name in _LIBRARY_FOLDERS]
    if root == "/usr":
        folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
    return Toolkit(root, version, next((folder for folder in folders if has_cudart(machine, folder)), None))


def has_cudart(machine: Machine, folder: str) -> bool:
    return bool(machine.glob(f"{folder.rstrip('/')}/libcudart.so*"))


def exports(root: str, libraries: str | None = None) -> tuple[str, str]:
    libraries = libraries or f"{root}/lib64"
    return (
        f"export PATH={root}/bin:$PATH",
        f"export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
    )


def install_line(version: str) -> str:
    package = f"cuda-toolkit-{short(version).replace('.', '-')}"
    return system_install(package, package)


# -- Host compilers: which one nvcc calls, and which are new enough, but not too new --

# Newest major version of gcc that each CUDA accepts, from its installation guides; a later CUDA accepts at least that.
_NEWEST_GCC = {
    (9, 2): 7,
    (10, 1): 8,
    (11, 0): 9,
    (11, 1): 10,
    (11, 4): 11,
    (12, 0): 12,
    (12, 4): 13,
    (12, 8): 14,
    (13, 0): 15,
}
_PLACES_OF_GCC = ("/usr/bin/gcc-*", "/usr/local/bin/gcc-*", "/opt/rh/gcc-toolset-*/root/usr/bin/gcc")


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str  # such as ``13.3.0``; empty if it reports none
    is_gcc: bool


def newest_gcc(cuda: str) -> int | None:
    """Return the newest major version of gcc that a CUDA accepts, ``None`` if that is not known."""
    known = [newest for bound, newest in _NEWEST_GCC.items() if bound <= release(cuda)[:2]]
    return max(known, default=None)


def host_compiler(machine: Machine, toolkit: Toolkit) -> Compiler | None:
    """Return the compiler that nvcc of a toolkit calls in builds of torch extensions, ``None`` if there is none."""
    beside = f"{toolkit.root}/bin/gcc"
    own = beside if toolkit.root != "/usr" and machine.exists(beside) else "gcc"
    path = machine.which(machine.environment.get("CC") or own)  # torch gives CC to nvcc before all else
    if path is None:
        return None
    printed = machine.run([path, "--version"]).output
    first = first_line(printed)
    is_gcc = "clang" not in first and "Free Software Foundation" in printed
    return Compiler(path, _found(r"\b(\d+\.\d+(?:\.\d+)?)\b", re.sub(r"\(.*?\)", "", first)), is_gcc)


def lines_for_gcc(machine: Machine, toolkit: Toolkit, newest: int) -> tuple[str, ...]:
    """Return the lines that give a toolkit a gcc of at most this major version, installed first if need be."""
    found = {}
    for path in (path for place in _PLACES_OF_GCC for path in machine.glob(place)):
        version = major(_found(r"gcc-(?:toolset-)?(\d{1,3})(?:/root/usr/bin/gcc)?$", path))
        if 0 < version <= newest:
            found[version] = path
    lines = []
    if found:
        gcc = found[max(found)]
    else:
        gcc = f"/usr/bin/gcc-{newest}"
        again = f"gcc-toolset-{newest}-gcc-c++, then lockstep-doctor cuda again"
        lines.append(system_install(f"gcc-{newest} g++-{newest}", again))
    gxx = re.sub(r"gcc(-\d+)?$", r"g++\1", gcc)
    # There is the system's own gcc; and CC counts more than what lies beside nvcc.
    if toolkit.root == "/usr" or machine.environment.get("CC"):
        return (*lines, f"export CC={gcc} CXX={gxx}")
    for name, path in (("gcc", gcc), ("g++", gxx)):
        link = f"{toolkit.root}/bin/{name}"
        lines.append(f"sudo ln -s{'f' if machine.exists(link) else ''} {path} {link}")
    return (*lines, f"# without root, instead of the links: export CC={gcc} CXX={gxx}")
