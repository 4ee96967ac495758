"""Versions that do not go together, and what the processes here may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_lockstep._text import size_in_words
from lightning_lockstep.doctor.machine import Limits, Machine, release, short
from lightning_lockstep.doctor.registry import CheckOptions, Finding, check, ok, problem, warning

_LIGHTNING = ("lightning", "pytorch-lightning")
_MALICIOUS = ((2, 6, 2), (2, 6, 3))
_OLDEST_TORCH, _OLDEST_DEEPSPEED = (2, 9), (0, 19)
_PYTHONS = ((3, 10), (3, 13))
# Release 0.24 of torchvision goes with torch 2.9, 0.25 with 2.10, and so on.
_TORCHVISION_AHEAD = 15
_GIB = 2**30
_LITTLE_MEMORY, _LITTLE_SHARED_MEMORY = 4 * _GIB, _GIB
_FEW_FILES, _ENOUGH_FILES = 1024, 4096


@check(
    name="packages",
    summary="versions that do not go together, limits of memory, CPU, open files and shared memory",
    why="""Packages that were built for another torch fail when they are imported, or crash later. Two releases of
    Lightning were malicious. Lightning is published under two names whose classes are distinct: a callback of one is
    not accepted by the other. A container or a job sees all memory and cores of its host and may use a part of them:
    what takes more is killed, or slows down. Data loader workers pass batches through /dev/shm and open a file for
    each.""",
)
def check_packages(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Look at installed versions and at limits."""
    packages = machine.python.packages
    yield _python(machine.python.version)
    yield from _torch(packages)
    yield from _lightning(packages)
    yield from _beside_torch(packages)
    yield from _cuda_libraries(packages)
    yield from _limits(machine.limits, machine.environment)


def _python(version: str) -> Finding:
    oldest, newest = _PYTHONS
    if oldest <= release(version)[:2] <= newest:
        return ok("Python", version)
    return problem(
        "Python",
        f"{version or 'unknown'}; expected 3.10 to 3.13.",
        "# make an environment of a Python between 3.10 and 3.13, such as",
        "python3.12 -m venv ~/lockstep && ~/lockstep/bin/pip install lightning-lockstep",
    )


def _torch(packages: Mapping[str, str]) -> Iterator[Finding]:
    torch = packages.get("torch")
    if torch is None:
        yield problem("torch", "It is not installed for this Python.", "pip install torch")
    elif release(torch) < _OLDEST_TORCH:
        yield problem("torch", f"{torch}; expected 2.9 or newer.", "pip install 'torch>=2.9'")
    else:
        yield ok("torch", torch)


def _lightning(packages: Mapping[str, str]) -> Iterator[Finding]:
    found = {name: packages[name] for name in _LIGHTNING if name in packages}
    malicious = [name for name, version in found.items() if release(version)[:3] in _MALICIOUS]
    for name in malicious:
        yield problem(
            name,
            f"{found[name]} is one of two malicious releases; it may have read passwords and keys of this account.",
            f"pip uninstall -y {name}",
            f"pip install --no-cache-dir '{name}>=2.6,<2.7,!=2.6.2,!=2.6.3'",
            "# then change every password, key and token that this account could read",
        )
    if not found:
        yield problem(
            "lightning", "It is not installed for this Python.", "pip install 'lightning>=2.6,<2.7'"
        )
    elif not malicious:
        yield from _namespaces(found)


def _namespaces(found: Mapping[str, str]) -> Iterator[Finding]:
    for name, version in found.items():
        if release(version)[:2] != (2, 6):
            fix = f"pip install '{name}>=2.6,<2.7,!=2.6.2,!=2.6.3'"
            yield problem(name, f"{version}; expected 2.6.", fix)
            return
    versions = dict.fromkeys(found.values())
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    if len(versions) > 1:
        newest = max(versions, key=release)
        yield warning(
            "two Lightnings",
            f"{shown}: two namespaces of different versions. Their classes are distinct, and objects of one are refused"
            " by the Trainer of the other.",
            f"pip install {' '.join(f'{name}=={newest}' for name in found)}",
        )
    elif len(found) > 1:
        yield ok(
            "two Lightnings",
            f"{shown}: of one version. Import from only one of them: their classes are distinct.",
        )
    else:
        yield ok("lightning", shown)


def _beside_torch(packages: Mapping[str, str]) -> Iterator[Finding]:
    torch = packages.get("torch")
    xla, vision, deepspeed = (packages.get(name) for name in ("torch-xla", "torchvision", "deepspeed"))
    if xla and torch and release(xla)[:2] != release(torch)[:2]:
        wanted = short(xla)
        yield problem(
            "torch-xla and torch",
            f"torch-xla {xla} is built for torch {wanted}, and torch is {torch}: importing it fails.",
            "# in an environment of its own, since other packages may need the newer torch",
            f"pip install 'torch=={wanted}.*' 'torch-xla=={wanted}.*'",
        )
    elif xla and torch:
        yield ok("torch-xla and torch", f"torch-xla {xla} with torch {torch}")
    fitting = _torchvision_for(torch)
    if vision and fitting and release(vision)[:2] != fitting:
        wanted = ".".join(map(str, fitting))
        yield problem(
            "torchvision and torch",
            f"torchvision {vision} is not for torch {torch}: its operators are not found.",
            f"pip install 'torchvision=={wanted}.*'",
        )
    if deepspeed and release(deepspeed) < _OLDEST_DEEPSPEED:
        yield warning("deepspeed", f"{deepspeed}; expected 0.19 or newer.", "pip install 'deepspeed>=0.19'")


def _torchvision_for(torch: str | None) -> tuple[int, int] | None:
    match release(torch)[:2]:
        case (2, minor):
            return (0, minor + _TORCHVISION_AHEAD)
    return None


def _cuda_libraries(packages: Mapping[str, str]) -> Iterator[Finding]:
    found = {name: version for name, version in packages.items() if name.startswith("nvidia-nccl-cu")}
    if len(found) > 1 and "torch" in packages:
        shown = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
        yield warning(
            "NCCL",
            f"{shown}: libraries of several CUDA versions lie in the same folder, and the last one installed is used.",
            f"pip uninstall -y {' '.join(sorted(found))}",
            f"pip install torch=={packages.get('torch', '').partition('+')[0]}  # with the one that it needs",
        )


def _limits(limits: Limits, environment: Mapping[str, str]) -> Iterator[Finding]:
    yield _memory(limits)
    yield _cores(limits, environment)
    yield _open_files(limits.open_files)
    yield _shared_memory(limits.shared_memory)


def _memory(limits: Limits) -> Finding:
    evidence = f"{size_in_words(limits.memory)} ({limits.memory_limited_by})"
    if limits.memory < limits.host_memory:
        evidence += f"; the host has {size_in_words(limits.host_memory)}, which tools like free show"
    if limits.memory < _LITTLE_MEMORY:
        return warning(
            "memory limit",
            f"{evidence}. Two ranks with torch take about 1 GiB before any model; what takes more is killed.",
            "# ask for more: docker run --memory=16g ..., sbatch --mem=16G ...",
        )
    return ok("memory limit", evidence)


def _cores(limits: Limits, environment: Mapping[str, str]) -> Finding:
    evidence = f"{limits.cores} of {limits.host_cores} cores may be used"
    threads = release(environment.get("OMP_NUM_THREADS"))
    if threads and threads[0] > limits.cores:
        return warning(
            "CPU limit",
            f"{evidence}, and OMP_NUM_THREADS={threads[0]}: threads wait for each other.",
            "unset OMP_NUM_THREADS  # threads_per_rank='auto' counts the cores",
        )
    return ok("CPU limit", evidence)


def _open_files(most: int | None) -> Finding:
    if most is None:
        return ok("open files", "no limit")
    if most < _FEW_FILES:
        return warning(
            "open files",
            f"at most {most} for each process: data loader workers and ranks fail with 'Too many open files'.",
            "ulimit -n 65536",
        )
    more = "" if most >= _ENOUGH_FILES else "; after 'Too many open files' from data loaders: ulimit -n 65536"
    return ok("open files", f"at most {most} for each process{more}")


def _shared_memory(size: int | None) -> Finding:
    if size is None:
        return warning(
            "/dev/shm",
            "There is none: data loader workers, NCCL and gloo pass data through it.",
            "# docker run --shm-size=8g ..., or: sudo mount -t tmpfs -o size=8g tmpfs /dev/shm",
        )
    evidence = size_in_words(size)
    if size < _LITTLE_SHARED_MEMORY:
        return warning(
            "/dev/shm",
            f"{evidence}: data loader workers and NCCL fail with 'Bus error' or 'No space left on device'.",
            "# start the container with: docker run --shm-size=8g ...  (or --ipc=host)",
        )
    return ok("/dev/shm", evidence)
