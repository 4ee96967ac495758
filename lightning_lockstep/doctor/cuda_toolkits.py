"""CUDA toolkits and compilers on this machine, and the variables that point to them."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from lightning_lockstep._text import first_line
from lightning_lockstep.doctor.machine import Machine, has_dnf, system_install
from lightning_lockstep.doctor.registry import Finding, ok, warning

# -- Version numbers as tools print them --

# A larger number is none of a version: int() would refuse the longest.
_MOST_DIGITS = 9


def release(version: str | None) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version, such as ``(2, 9, 0)`` of ``2.9.0+cu128``; empty if none."""
    match = re.match(r"\s*[vV]?(\d+(?:\.\d+)*)", version or "", re.ASCII)
    if match is None:
        return ()
    parts = match[1].split(".")
    return tuple(map(int, parts)) if max(map(len, parts)) <= _MOST_DIGITS else ()


def major(version: str | None) -> int:
    """Return the first number of a version, 0 if there is none."""
    return next(iter(release(version)), 0)


def short(version: str | None, parts: int = 2) -> str:
    """Return the first numbers of a version, such as ``2.9`` of ``2.9.0+cu128``; empty if there are none."""
    return ".".join(map(str, release(version)[:parts]))


# -- CUDA toolkits of a machine: all of them, and which one its variables find --

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


# -- Host compilers: which one nvcc uses, and which are new enough, but not too new --

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


# -- ``PATH`` and ``LD_LIBRARY_PATH``, as far as they name CUDA: whether the folders exist, contain it, and
# agree

_NAMES = ("PATH", "LD_LIBRARY_PATH")
_CUDA = re.compile(r"cuda", re.IGNORECASE)


def check_variables(machine: Machine) -> Iterator[Finding]:
    """Look at the folders of CUDA that the variables name."""
    yield from _home(machine)
    named = False
    for name in _NAMES:
        folders = [folder for folder in machine.environment.get(name, "").split(":") if _CUDA.search(folder)]
        named = named or bool(folders)
        missing = [folder for folder in folders if not machine.exists(folder)]
        if missing:
            fix = f"export {name}={_without(machine.environment[name], missing)}"
            yield warning(name, f"It names folders that do not exist: {', '.join(missing)}.", fix)
    used = toolkit_in_use(machine)
    if used is not None:
        yield from _libraries(machine, used)
        if named:
            yield from _shown(machine)


def broken_homes(machine: Machine) -> dict[str, str]:
    """Return the variables that say where CUDA is, and name a folder without its compiler."""
    given = {name: machine.environment.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH")}
    return {name: home for name, home in given.items() if home and not machine.exists(f"{home}/bin/nvcc")}


def _home(machine: Machine) -> Iterator[Finding]:
    for name, home in broken_homes(machine).items():
        evidence = f"Set to {home}, but there is no {home}/bin/nvcc: builds look only there."
        yield warning(name, evidence, f"unset {name}", "lockstep-doctor cuda  # what is found without it")


def _libraries(machine: Machine, used: Toolkit) -> Iterator[Finding]:
    """Compare the first libcudart of LD_LIBRARY_PATH with the toolkit that is used."""
    folders = [folder for folder in machine.environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    of_cuda = [folder for folder in folders if _CUDA.search(folder) and machine.exists(folder)]
    empty = [folder for folder in of_cuda if _is_of_toolkit(folder) and not _holds(machine, folder)]
    for folder in empty:
        evidence = f"{folder} contains no libcudart.so: the toolkit is incomplete, or the path is wrong."
        yield warning("LD_LIBRARY_PATH", evidence, *exports(used.root, used.libraries))
    first = next((folder for folder in folders if _holds(machine, folder)), None)
    if first is None or used.libraries is None:
        return
    if machine.real_path(first) != machine.real_path(used.libraries):
        found = _version_of(machine, first)
        if found and used.major is not None and found[0] == used.major:
            return
        yield warning(
            "LD_LIBRARY_PATH",
            f"{first} comes first there, and the compiler is that of {used}: programs load libraries of another CUDA"
            " than they are built with.",
            *exports(used.root, used.libraries),
        )


def _shown(machine: Machine) -> Iterator[Finding]:
    for name in _NAMES:
        folders = machine.environment.get(name, "").split(":")
        of_cuda = [folder for folder in folders if _CUDA.search(folder)]
        if of_cuda:
            yield ok(name, f"{' before '.join(of_cuda)} (of {len(folders)} in all)")


def _is_of_toolkit(folder: str) -> bool:
    return re.search(r"/cuda[^/]*/(lib64|lib|targets/[^/]+/lib)/?$", folder) is not None


def _holds(machine: Machine, folder: str) -> bool:
    return bool(machine.glob(f"{folder.rstrip('/')}/libcudart.so*"))


def _version_of(machine: Machine, folder: str) -> tuple[int, ...]:
    """Return the version of the libcudart of a folder, by the names of its files."""
    versions = [
        release(path.rpartition(".so.")[2]) for path in machine.glob(f"{folder.rstrip('/')}/libcudart.so.*")
    ]
    match = re.search(r"cuda-(\d+(?:\.\d+)?)", machine.real_path(folder))
    return max(versions, default=()) or release(match[1] if match else None)


def _without(value: str, missing: list[str]) -> str:
    return ":".join(folder for folder in value.split(":") if folder not in missing) or "''"
