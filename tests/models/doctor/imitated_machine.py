"""A machine imitated from a record of its files and of what its tools print."""

from __future__ import annotations

import fnmatch
import posixpath
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_lockstep._system import NOT_FOUND, Completed
from lightning_lockstep.doctor.machine import Limits, Machine, Probed, Python
from lightning_lockstep.doctor.registry import CheckOptions, CheckResult, function_of

_GIB = 2**30
_MOST_LINKS = 20
_KEYS = {
    "about",
    "ages",
    "commands",
    "environment",
    "expected",
    "files",
    "limits",
    "links",
    "options",
    "packages",
    "probes",
    "python",
}


class ImitatedMachine(Machine):
    """A machine that answers from a record."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        # In the record, each of which may be missing: ``files`` (text by path), ``links`` (target by path),
        # ``commands`` (by command line: what it prints, or ``output``, ``error`` and ``exit``), ``packages``
        # (version by name), ``ages`` (of files [s], by path; 0 of others), ``probes`` (facts by name,
        # or ``error``), ``environment``, ``python`` and ``limits``.
        self.environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            **{name: str(value) for name, value in _mapping(record, "environment").items()},
        }
        self._files = {path: str(text or "") for path, text in _mapping(record, "files").items()}
        self._links = {path: str(target) for path, target in _mapping(record, "links").items()}
        self._ages = _mapping(record, "ages")
        self._probes = _mapping(record, "probes")
        self._commands = {tuple(shlex.split(c)): made for c, made in _mapping(record, "commands").items()}
        for program in {command[0] for command in self._commands}:
            path = program if program.startswith("/") else f"/usr/bin/{program}"
            self._files.setdefault(path, "")
        self.python = _python(_mapping(record, "python"), _mapping(record, "packages"))
        if "headers" not in _mapping(record, "python"):
            self._files.setdefault(f"{self.python.headers}/Python.h", "")
        self.limits = _limits(_mapping(record, "limits"))

    def run(self, command: Sequence[str], timeout: float = 10.0) -> Completed:
        """Return what is recorded for a command line, of the program that ``PATH`` finds."""
        path = self.which(command[0])
        if path is None:
            return Completed(NOT_FOUND, "", f"{command[0]}: not found")
        real = self.real_path(path)
        names = [path, real, posixpath.basename(real), posixpath.basename(path)]
        for name in names:
            made = self._commands.get((name, *command[1:]))
            if isinstance(made, Mapping):
                return Completed(int(made.get("exit", 0)), str(made.get("output", "")), str(made.get("error", "")))
            if made is not None:
                return Completed(0, str(made))
        return Completed(1, "", f"{command[0]}: nothing is recorded for {shlex.join(command)}")

    def which(self, program: str) -> str | None:
        if "/" in program:
            return program if self.exists(program) else None
        folders = self.environment.get("PATH", "").split(":")
        paths = (posixpath.join(folder, program) for folder in folders if folder)
        return next((path for path in paths if self.exists(path)), None)

    def read_text(self, path: str) -> str | None:
        return self._files.get(self.real_path(path))

    def exists(self, path: str) -> bool:
        real = self.real_path(path)
        return real in self._files or any(name.startswith(f"{real}/") for name in [*self._files, *self._links])

    def age(self, path: str) -> float | None:
        return float(self._ages.get(path, 0)) if self.exists(path) else None

    def glob(self, pattern: str) -> list[str]:
        return sorted({path for path in self._paths() if _matches(path, pattern)})

    def real_path(self, path: str) -> str:
        path = posixpath.normpath(path)
        for _ in range(_MOST_LINKS):
            link = next((link for link in self._links if path == link or path.startswith(f"{link}/")), None)
            if link is None:
                break
            target = posixpath.join(posixpath.dirname(link), self._links[link])
            path = posixpath.normpath(target + path[len(link) :])
        return path

    def probe(self, name: str, *arguments: str, timeout: float = 60.0) -> Probed:
        made = self._probes.get(name)
        if not isinstance(made, Mapping):
            return Probed(error=str(made) if made else "nothing is recorded for it")
        return Probed(error=str(made["error"])) if "error" in made else Probed(made)

    def _paths(self) -> Iterator[str]:
        for path in [*self._files, *self._links]:
            yield path
            yield from (str(parent) for parent in Path(path).parents)
        for link, target in self._links.items():
            real = posixpath.normpath(posixpath.join(posixpath.dirname(link), target))
            yield from (link + path[len(real) :] for path in self._files if path.startswith(f"{real}/"))


def read_machine(path: Path) -> ImitatedMachine:
    """Return the machine that a record describes."""
    return ImitatedMachine(read_record(path))


def read_record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    assert not set(record) - _KEYS, f"{path}: expected some of {sorted(_KEYS)}"
    return record


def run_check(name: str, machine: Machine, options: CheckOptions) -> CheckResult:
    """Run a check in this process and return its result."""
    began = time.monotonic()
    return CheckResult(name, tuple(function_of(name)(machine, options)), time.monotonic() - began)


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return {str(name): entry for name, entry in value.items()} if isinstance(value, Mapping) else {}


def _python(given: Mapping[str, Any], packages: Mapping[str, Any]) -> Python:
    version = str(given.get("version", "3.11.7"))
    short = ".".join(version.split(".")[:2])
    # Those of the record lie in one folder, but for those that it names.
    folder = f"/opt/venv/lib/python{short}/site-packages"
    return Python(
        executable=str(given.get("executable", "/opt/venv/bin/python")),
        version=version,
        packages={name: str(version) for name, version in packages.items()},
        folders={**dict.fromkeys(packages, folder), **_mapping(given, "folders")},
        headers=str(given.get("headers", f"/usr/include/python{short}")),
    )


def _limits(given: Mapping[str, Any]) -> Limits:
    cores = int(given.get("cores", 8))
    host_memory = int(float(given.get("host_memory_gib", 64)) * _GIB)
    memory = int(float(given.get("memory_gib", host_memory / _GIB)) * _GIB)
    shared = given.get("shared_memory_gib", 32)
    return Limits(
        cores=cores,
        host_cores=int(given.get("host_cores", cores)),
        memory=memory,
        memory_limited_by="memory of this host" if memory == host_memory else "memory of this control group",
        host_memory=host_memory,
        open_files=given.get("open_files", 65536),
        shared_memory=None if shared is None else int(float(shared) * _GIB),
    )


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
