"""Versions that do not go together, and what the processes here may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_lockstep._text import install_command, size_in_words
from lightning_lockstep.doctor.machine import MORE_SHARED_MEMORY, Limits, Machine, major, release, short
from lightning_lockstep.doctor.registry import CheckOptions, Finding, ok, problem, warning

_LIGHTNING = ("lightning", "pytorch-lightning")
_LIGHTNINGS = ">=2.6,<2.7,!=2.6.2,!=2.6.3"
_MALICIOUS = ((2, 6, 2), (2, 6, 3))
# As in pyproject.toml, which scripts/checks/files.py compares.
RELEASES = {"torch": ">=2.9,<2.16", "deepspeed": ">=0.19,<0.20"}
_PYTHONS = ((3, 10), (3, 13))
# Release 0.24 of torchvision goes with torch 2.9, 0.25 with 2.10, and so on.
_TORCHVISION_AHEAD = 15
_GIB = 2**30
_LITTLE_MEMORY, _LITTLE_SHARED_MEMORY = 4 * _GIB, _GIB
_FEW_FILES = 1024


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    packages = machine.python.packages
    yield _python(machine.python.version)
    if "torch" not in packages:
        yield problem("torch", "It is not installed for this Python.", "pip install torch")
    yield from (_release(name, packages[name]) for name in RELEASES if name in packages)
    yield from _lightning(packages)
    yield from _torchvision(packages)
    limits = machine.limits
    yield _memory(limits)
    yield _cores(limits, machine.environment)
    yield _open_files(limits.open_files)
    yield _shared_memory(limits.shared_memory)


def _python(version: str) -> Finding:
    oldest, newest = _PYTHONS
    if oldest <= release(version)[:2] <= newest:
        return ok("Python", version)
    return problem(
        "Python",
        f"{version or 'unknown'}; expected 3.10 to 3.13.",
        "# make an environment of a Python between 3.10 and 3.13, such as",
        f"python3.12 -m venv ~/lockstep && ~/lockstep/bin/{install_command()}",
    )


def _release(name: str, version: str) -> Finding:
    oldest, beyond = (release(bound.strip("<>=")) for bound in RELEASES[name].split(","))
    if oldest <= release(version)[:2] < beyond:
        return ok(name, version)
    evidence, fix = f"{version}; expected {RELEASES[name]}", f"pip install '{name}{RELEASES[name]}'"
    if release(version) < oldest:
        return problem(name, f"{evidence}.", fix)
    return warning(name, f"{evidence}: this package was not tested with it.", fix)


def _lightning(packages: Mapping[str, str]) -> Iterator[Finding]:
    found = {name: packages[name] for name in _LIGHTNING if name in packages}
    if not found:
        evidence = "It is not installed for this Python."
        yield problem("lightning", evidence, "pip install 'lightning>=2.6,<2.7'")
    bad = []
    for name, version in found.items():
        if release(version)[:3] in _MALICIOUS:
            bad.append(name)
            yield problem(
                name,
                f"{version} is one of two malicious releases; it may have read passwords and keys of this account.",
                f"pip uninstall -y {name}",
                f"pip install --no-cache-dir '{name}{_LIGHTNINGS}'",
                "# then change every password, key and token that this account could read",
            )
        elif release(version)[:2] != (2, 6):
            bad.append(name)
            yield problem(name, f"{version}; expected 2.6.", f"pip install '{name}{_LIGHTNINGS}'")
    if not found or bad:
        return
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    newest = max(found.values(), key=release)
    if len(set(found.values())) == 1:
        yield ok("lightning", shown)
    else:
        yield warning(
            "two Lightnings",
            f"{shown}: two namespaces of different versions. Their classes are distinct, and objects of one are refused"
            " by the Trainer of the other.",
            f"pip install {' '.join(f'{name}=={newest}' for name in found)}",
        )


def _torchvision(packages: Mapping[str, str]) -> Iterator[Finding]:
    torch, vision = packages.get("torch"), packages.get("torchvision")
    numbers = release(torch)
    if vision and len(numbers) > 1 and numbers[0] == 2:
        wanted = f"0.{numbers[1] + _TORCHVISION_AHEAD}"
        if short(vision) != wanted:
            evidence = f"torchvision {vision} is not for torch {torch}: its operators are not found."
            yield problem("torchvision and torch", evidence, f"pip install 'torchvision=={wanted}.*'")


def _memory(limits: Limits) -> Finding:
    evidence = f"{size_in_words(limits.memory)} ({limits.memory_limited_by})"
    if limits.memory < limits.host_memory:
        evidence += f"; the host has {size_in_words(limits.host_memory)}, which tools like free show"
    if limits.memory >= _LITTLE_MEMORY:
        return ok("memory limit", evidence)
    evidence += ". Two ranks with torch take about 1 GiB before any model; what takes more is killed."
    return warning("memory limit", evidence, "# more: docker run --memory=16g ..., sbatch --mem=16G ...")


def _cores(limits: Limits, environment: Mapping[str, str]) -> Finding:
    evidence = f"{limits.cores} of {limits.host_cores} cores may be used"
    threads = major(environment.get("OMP_NUM_THREADS"))
    if threads <= limits.cores:
        return ok("CPU limit", evidence)
    evidence += f", and OMP_NUM_THREADS={threads}: threads wait for each other."
    return warning("CPU limit", evidence, "unset OMP_NUM_THREADS  # threads_per_rank='auto' counts the cores")


def _open_files(most: int | None) -> Finding:
    subject, more = "open files", "ulimit -n 65536"
    if most is None:
        return ok(subject, "no limit")
    evidence = f"at most {most} for each process"
    if most > _FEW_FILES:
        return ok(subject, evidence)
    evidence += ": data loader workers and ranks may fail with 'Too many open files'."
    return warning(subject, evidence, more)


def _shared_memory(free: int | None) -> Finding:
    subject = "/dev/shm"
    if free is None:
        evidence = "There is none: data loader workers, NCCL and gloo pass data through it."
        fix = "# docker run --shm-size=8g ..., or: sudo mount -t tmpfs -o size=8g tmpfs /dev/shm"
        return warning(subject, evidence, fix)
    evidence = f"{size_in_words(free)} are free"
    if free >= _LITTLE_SHARED_MEMORY:
        return ok(subject, evidence)
    evidence += ": data loader workers and NCCL fail with 'Bus error' or 'No space left on device'."
    return warning(subject, evidence, *MORE_SHARED_MEMORY)
