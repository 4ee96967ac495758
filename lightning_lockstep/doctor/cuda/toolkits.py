"""CUDA toolkits of a machine: all of them, and which one its variables find."""

from __future__ import annotations

import json
import posixpath
import re
from dataclasses import dataclass

from lightning_lockstep.doctor.cuda.versions import release, short
from lightning_lockstep.doctor.machines.machine import Machine
from lightning_lockstep.doctor.machines.package_manager import system_install

__all__ = [
    "Toolkit",
    "compiles_for",
    "exports",
    "find_toolkits",
    "first_compiling",
    "install_line",
    "library_folders",
    "toolkit_in_use",
]

_PLACES = ("/usr/local/cuda*", "/opt/cuda*", "/opt/nvidia/hpc_sdk/*/*/cuda/*", "/usr/lib/cuda")
_VARIABLES = ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
# Where builds of torch extensions look at last.
_LAST_GUESS = "/usr/local/cuda"
# First CUDA whose nvcc compiles for a compute capability, and first that does not any more, by the major version.
_COMPILED_FROM = {
    (7, 0): (9, 0),
    (7, 2): (9, 0),
    (7, 5): (10, 0),
    (8, 0): (11, 0),
    (8, 6): (11, 1),
    (8, 7): (11, 4),
    (8, 9): (11, 8),
    (9, 0): (11, 8),
    (10, 0): (12, 8),
    (10, 3): (12, 9),
    (11, 0): (13, 0),
    (12, 0): (12, 8),
    (12, 1): (12, 9),
}
_OLDEST_OF = {13: (7, 5), 12: (5, 0)}
_LIBRARY_FOLDERS = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


@dataclass(frozen=True)
class Toolkit:
    root: str  # with links followed
    version: str  # such as ``12.8.1``; empty if its compiler reports none
    libraries: str | None  # the folder that holds ``libcudart.so``, if one does

    @property
    def major(self) -> int | None:
        numbers = release(self.version)
        return numbers[0] if numbers else None

    def __str__(self) -> str:
        return f"{self.root} ({self.version or 'of unknown version'})"


def find_toolkits(machine: Machine) -> list[Toolkit]:
    """Return all toolkits that have a compiler, the newest first."""
    roots = [path for place in _PLACES for path in machine.glob(place)]
    roots += [machine.environment.get(name, "") for name in _VARIABLES]
    in_use = toolkit_in_use(machine)
    found = {root: None for path in roots if path.startswith("/") for root in [machine.real_path(path)]}
    toolkits = [_toolkit(machine, root) for root in found if machine.exists(f"{root}/bin/nvcc")]
    if in_use is not None and in_use.root not in found:
        toolkits.append(in_use)
    return sorted(toolkits, key=lambda toolkit: release(toolkit.version), reverse=True)


def toolkit_in_use(machine: Machine) -> Toolkit | None:
    """Return the toolkit that builds find, as torch looks for it: ``CUDA_HOME``, ``PATH``, then ``/usr/local/cuda``."""
    home = machine.environment.get("CUDA_HOME") or machine.environment.get("CUDA_PATH")
    if not home and (found := toolkit_on_path(machine)) is not None:
        return found
    home = home or _LAST_GUESS
    return _toolkit(machine, machine.real_path(home)) if machine.exists(f"{home}/bin/nvcc") else None


def first_compiling(capability: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first CUDA whose nvcc compiles for a compute capability; empty where that is not known."""
    return _COMPILED_FROM.get((capability[0], capability[1]), ()) if len(capability) == 2 else ()


def compiles_for(cuda: str, capability: tuple[int, ...]) -> bool:
    """Return whether the nvcc of a CUDA compiles for a compute capability, as far as that is known."""
    version = release(cuda)
    oldest = next((oldest for major, oldest in _OLDEST_OF.items() if version >= (major,)), ())
    return not version or not capability or (oldest <= capability and first_compiling(capability) <= version)


def toolkit_on_path(machine: Machine) -> Toolkit | None:
    """Return the toolkit whose compiler ``PATH`` finds."""
    program = machine.which("nvcc")
    if program is None:
        return None
    program = machine.real_path(program)
    text = machine.read_text(program) or ""
    # A script in the place of the compiler, as packages and modules put there, names the real one.
    named = re.search(r"(/[^\s\"']+)/bin/nvcc\b", text) if text.startswith("#!") else None
    root = named[1] if named else posixpath.dirname(posixpath.dirname(program))
    return _toolkit(machine, machine.real_path(root), program)


def library_folders(machine: Machine, root: str) -> str | None:
    """Return the folder of a toolkit that holds ``libcudart.so``."""
    folders = [f"{root}/{name}" for name in _LIBRARY_FOLDERS]
    if root == "/usr":
        folders += ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
    return next((folder for folder in folders if machine.glob(f"{folder}/libcudart.so*")), None)


def exports(root: str, libraries: str | None = None) -> tuple[str, str]:
    """Return the lines that put a toolkit in front of all others."""
    libraries = libraries or f"{root}/lib64"
    return (
        f"export PATH={root}/bin:$PATH",
        f"export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
    )


def install_line(version: str, machine: Machine) -> str:
    """Return the command that installs a toolkit."""
    package = f"cuda-toolkit-{short(version).replace('.', '-')}"
    return system_install(machine, package, package)


def _toolkit(machine: Machine, root: str, program: str | None = None) -> Toolkit:
    return Toolkit(
        root, _version(machine, root, program or f"{root}/bin/nvcc"), library_folders(machine, root)
    )


def _version(machine: Machine, root: str, program: str) -> str:
    try:
        described = json.loads(machine.read_text(f"{root}/version.json") or "")["cuda"]["version"]
        if release(str(described)):
            return str(described)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass  # absent before CUDA 11; then the compiler is asked
    output = machine.run([program, "--version"]).output
    match = re.search(r"\bV(\d+\.\d+\.\d+)", output) or re.search(r"release (\d+\.\d+)", output)
    return match[1] if match else ""
