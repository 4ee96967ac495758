"""Host compilers: which one nvcc uses, and which are new enough, but not too new."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise

from lightning_lockstep._text import first_line
from lightning_lockstep.doctor.cuda.toolkits import Toolkit
from lightning_lockstep.doctor.cuda.versions import release
from lightning_lockstep.doctor.machines.machine import Machine
from lightning_lockstep.doctor.machines.package_manager import has_dnf, system_install

__all__ = ["Compiler", "host_compiler", "link_lines", "newest_gcc"]

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


@dataclass(frozen=True)
class Compiler:
    path: str
    version: str  # such as ``13.3.0``; empty if it reports none
    is_gcc: bool

    @property
    def major(self) -> int | None:
        numbers = release(self.version)
        return numbers[0] if numbers else None


def host_compiler(machine: Machine, toolkit: Toolkit, *, with_cc: bool = True) -> Compiler | None:
    """Return the compiler that nvcc of a toolkit calls in builds of torch extensions, ``None`` if there is none."""
    beside = f"{toolkit.root}/bin/gcc"
    # torch gives CC to nvcc before all else.
    cc = _words(machine.environment.get("CC", ""))[:1] if with_cc else []
    named = next(iter(cc), None) or _named_to_nvcc(machine)
    named = named or (beside if toolkit.root != "/usr" and machine.exists(beside) else "gcc")
    path = machine.which(named)
    return None if path is None else _compiler(machine, path)


def newest_gcc(cuda: str) -> int | None:
    """Return the newest major version of gcc that a CUDA accepts, ``None`` if that is not known."""
    wanted = release(cuda)[:2]
    known = [bound for bound in _NEWEST_GCC if bound <= wanted]
    return _NEWEST_GCC[max(known)] if known else None


def link_lines(machine: Machine, toolkit: Toolkit, newest: int) -> tuple[str, ...]:
    """Return the lines that give a toolkit a gcc of at most this major version, installed first if need be."""
    older = _installed_gcc(machine, newest)
    lines = [] if older else [_install(machine, newest)]
    gcc = older or _path_after_install(machine, newest)
    gxx = re.sub(r"gcc(-\d+)?$", r"g++\1", gcc)
    if toolkit.root == "/usr":  # the system's own gcc stands there
        return (*lines, f"export NVCC_PREPEND_FLAGS='-ccbin {gxx}'")
    for name, path in (("gcc", gcc), ("g++", gxx)):
        link = f"{toolkit.root}/bin/{name}"
        lines.append(f"sudo ln -s{'f' if machine.exists(link) else ''} {path} {link}")
    return (*lines, f"# without root, instead of the links: export NVCC_PREPEND_FLAGS='-ccbin {gxx}'")


def _installed_gcc(machine: Machine, newest: int) -> str | None:
    """Return the newest gcc beside the system's own that is old enough."""
    found = {}
    for pattern in ("/usr/bin/gcc-*", "/usr/local/bin/gcc-*", "/opt/rh/gcc-toolset-*/root/usr/bin/gcc"):
        for path in machine.glob(pattern):
            match = re.search(r"gcc-(?:toolset-)?(\d{1,3})(?:/root/usr/bin/gcc)?$", path)
            if match and int(match[1]) <= newest:
                found[int(match[1])] = path
    return found[max(found)] if found else None


def _path_after_install(machine: Machine, version: int) -> str:
    return (
        f"/opt/rh/gcc-toolset-{version}/root/usr/bin/gcc" if has_dnf(machine) else f"/usr/bin/gcc-{version}"
    )


def _named_to_nvcc(machine: Machine) -> str | None:
    words = _words(machine.environment.get("NVCC_PREPEND_FLAGS", ""))
    named = [after for option, after in pairwise(words) if option in ("-ccbin", "--compiler-bindir")]
    named += [word.partition("=")[2] for word in words if word.startswith(("-ccbin=", "--compiler-bindir="))]
    return next((path for path in [*named, machine.environment.get("NVCC_CCBIN", "")] if path), None)


def _compiler(machine: Machine, path: str) -> Compiler:
    printed = machine.run([path, "--version"]).output
    first = first_line(printed)
    is_gcc = "clang" not in first and "Free Software Foundation" in printed
    numbers = re.findall(r"\b(\d+\.\d+(?:\.\d+)?)\b", re.sub(r"\(.*?\)", "", first))
    return Compiler(path, numbers[0] if numbers else "", is_gcc)


def _install(machine: Machine, version: int) -> str:
    return system_install(machine, f"gcc-{version} g++-{version}", f"gcc-toolset-{version}-gcc-c++")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
