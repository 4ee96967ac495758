"""A machine imitated from a record of its files and of what its tools print."""

from __future__ import annotations

import fnmatch
import posixpath
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_lockstep._system import NOT_FOUND, Completed
from lightning_lockstep.doctor.machine import Limits, Probed, Python
from lightning_lockstep.errors import ConfigurationError

_RECORDS = ("machine.yaml", "machine.yml", "machine.json")
_GIB = 2**30
_MOST_LINKS = 20
_KEYS = {
    "about",
    "commands",
    "environment",
    "expected",
    "files",
    "host",
    "limits",
    "links",
    "options",
    "packages",
    "probes",
    "python",
}


class ImitatedMachine:
    """A machine that answers from a record; see :class:`lightning_lockstep.doctor.machine.Machine`."""

    is_imitated = True

    def __init__(self, record: Mapping[str, Any], root: Path | None = None) -> None:
        # In the record, each of which may be missing: ``files`` (text by path), ``links`` (target by path),
        # ``commands`` (by command line: what it prints, or ``output``, ``error`` and ``exit``), ``packages``
        # (version by name), ``probes`` (facts by name, or ``error``), ``environment``, ``python``, ``limits``
        # and ``host``.
        self._root = root  # files are looked for below it too
        self.host = str(record.get("host", "imitated"))
        self.environment: Mapping[str, str] = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            **{name: str(value) for name, value in _mapping(record, "environment").items()},
        }
        self._files = {path: str(text or "") for path, text in _mapping(record, "files").items()}
        self._links = {path: str(target) for path, target in _mapping(record, "links").items()}
        self._probes = _mapping(record, "probes")
        self._commands = {tuple(shlex.split(c)): made for c, made in _mapping(record, "commands").items()}
        for program in {command[0] for command in self._commands}:
            path = program if program.startswith("/") else f"/usr/bin/{program}"
            self._files.setdefault(path, "")
        self.python = _python(_mapping(record, "python"), _mapping(record, "packages"))
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
                return Completed(
                    int(made.get("exit", 0)), str(made.get("output", "")), str(made.get("error", ""))
                )
            if made is not None:
                return Completed(0, str(made))
        return Completed(1, "", f"{command[0]}: nothing is recorded for {shlex.join(command)}")

    def which(self, program: str) -> str | None:
        if "/" in program:
            return program if self.exists(program) else None
        folders = self.environment.get("PATH", "").split(":")
        paths = (posixpath.join(folder, program) for folder in folders if folder)
        return next((path for path in paths if self.exists(path)), None)

    def read_text(self, path: str, *, whole: bool = False) -> str | None:
        real = self.real_path(path)
        if real in self._files:
            return self._files[real]
        below = self._below_root(real)
        try:
            return None if below is None else below.read_text(errors="replace")
        except (OSError, ValueError):
            return None

    def exists(self, path: str) -> bool:
        real = self.real_path(path)
        if real in self._files or any(name.startswith(f"{real}/") for name in [*self._files, *self._links]):
            return True
        below = self._below_root(real)
        return below is not None and below.exists()

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
        if self._root is not None:
            yield from (f"/{path.relative_to(self._root)}" for path in self._root.rglob("*"))

    def _below_root(self, path: str) -> Path | None:
        return None if self._root is None else self._root / path.lstrip("/")


def read_machine(path: Path) -> ImitatedMachine:
    """Return the machine that a record describes, a YAML or JSON file, or a folder with the machine's files."""
    root = path if path.is_dir() else None
    file = next((path / name for name in _RECORDS if (path / name).exists()), None) if root else path
    return ImitatedMachine({} if file is None else _read_record(file), root)


def check_record(path: Path) -> None:
    """Check that a record can be read, before checks begin to."""
    if not (path.is_file() or path.is_dir()):
        raise ConfigurationError(f"--sysroot {path}: expected a file or a folder.")
    read_machine(path)  # each check reads it again, so it cannot be a pipe


def _read_record(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        record = yaml.load(
            file.read_text(errors="replace"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        )
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"--sysroot {file}: cannot be read ({' '.join(str(error).split())})."
        ) from error
    if not isinstance(record, Mapping):
        raise ConfigurationError(
            f"--sysroot {file}: expected a table with some of {', '.join(sorted(_KEYS))}."
        )
    unknown = sorted(str(key) for key in set(record) - _KEYS)
    if unknown:
        raise ConfigurationError(
            f"--sysroot {file}: {', '.join(unknown)}: expected some of {', '.join(sorted(_KEYS))}."
        )
    return record


def _mapping(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return {str(name): entry for name, entry in value.items()} if isinstance(value, Mapping) else {}


def _python(given: Mapping[str, Any], packages: Mapping[str, Any]) -> Python:
    version = str(given.get("version", "3.11.7"))
    short = ".".join(version.split(".")[:2])
    return Python(
        executable=str(given.get("executable", "/opt/venv/bin/python")),
        version=version,
        include=str(given.get("include", f"/usr/include/python{short}")),
        site_packages=str(given.get("site_packages", f"/opt/venv/lib/python{short}/site-packages")),
        packages={name: str(version) for name, version in packages.items()},
        folders={name: str(folder) for name, folder in _mapping(given, "folders").items()},
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
        locked_memory=given.get("locked_memory"),
    )


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
