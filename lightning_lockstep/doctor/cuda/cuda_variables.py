"""``PATH`` and ``LD_LIBRARY_PATH``, as far as they name CUDA: whether the folders exist, contain it, and agree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lightning_lockstep.doctor.cuda.toolkits import Toolkit, exports, toolkit_in_use
from lightning_lockstep.doctor.cuda.versions import release
from lightning_lockstep.doctor.findings import Finding, ok, warning
from lightning_lockstep.doctor.machines.machine import Machine

__all__ = ["broken_homes", "check_variables"]

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
