"""What builds for GPUs find: the toolkit, whether it goes with torch and compiles for the GPUs, the host compiler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_lockstep.doctor.cuda.compilers import Compiler, host_compiler, link_lines, newest_gcc
from lightning_lockstep.doctor.cuda.cuda_variables import broken_homes
from lightning_lockstep.doctor.cuda.nvidia import Gpu
from lightning_lockstep.doctor.cuda.toolkits import (
    Toolkit,
    compiles_for,
    exports,
    find_toolkits,
    first_compiling,
    install_line,
    toolkit_in_use,
)
from lightning_lockstep.doctor.cuda.torch_build import TorchBuild
from lightning_lockstep.doctor.cuda.versions import major, release, short
from lightning_lockstep.doctor.findings import Finding, not_applicable, ok, problem, warning
from lightning_lockstep.doctor.machines.machine import Machine

__all__ = ["check_host_compiler", "check_toolkits"]


def check_toolkits(machine: Machine, torch: TorchBuild, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Look at the toolkits of the system, and at the one that builds find."""
    toolkits, used = find_toolkits(machine), toolkit_in_use(machine)
    listed = "; ".join(f"{toolkit}{' <- found first' if toolkit == used else ''}" for toolkit in toolkits)
    if toolkits:
        yield ok("toolkits", listed)
    elif torch.cuda and "deepspeed" not in machine.python.packages:
        evidence = (
            f"There is none. torch runs with its own CUDA {torch.cuda}; builds such as DeepSpeed's need one."
        )
        yield not_applicable("toolkits", evidence)
    elif torch.cuda:
        yield warning(
            "toolkits",
            f"There is none. torch runs with its own CUDA {torch.cuda}; DeepSpeed's operations cannot be compiled.",
            install_line(torch.cuda, machine),
            *exports(f"/usr/local/cuda-{short(torch.cuda)}"),
        )
    else:
        yield not_applicable("toolkits", "There is none, and torch needs none.")
    if toolkits and torch.cuda and not broken_homes(machine):
        yield _match(machine, torch, toolkits, used)
        if used is not None and used.major == major(torch.cuda):
            yield from _for_gpus(machine, torch, used, gpus)


def _match(machine: Machine, torch: TorchBuild, toolkits: Sequence[Toolkit], used: Toolkit | None) -> Finding:
    subject, wanted = "toolkit and torch", major(torch.cuda)
    fix = _matching_lines(machine, torch, toolkits)
    if used is None:
        evidence = "nvcc is not found: neither on PATH nor in /usr/local/cuda, where builds look for CUDA."
        return warning(subject, evidence, *fix)
    if used.major is None:
        fix = (f"{used.root}/bin/nvcc --version", *fix)
        return warning(subject, f"nvcc of {used.root} does not report its version.", *fix)
    if used.major != wanted:
        return problem(
            subject,
            f"{used} is found first, and torch is built for CUDA {torch.cuda}: the major versions differ, so"
            " extensions compiled here do not work with torch.",
            *fix,
        )
    if short(used.version) != short(torch.cuda):
        return ok(subject, f"{used} and torch's CUDA {torch.cuda}: the minor versions may differ")
    return ok(subject, f"{used} and torch's CUDA {torch.cuda}")


def _for_gpus(machine: Machine, torch: TorchBuild, used: Toolkit, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    """Whether the toolkit that builds find compiles for the GPUs of this host."""
    without = [gpu for gpu in gpus if not compiles_for(used.version, gpu.capability)]
    kinds = dict.fromkeys((gpu.name, gpu.capability) for gpu in without)
    for name, capability in kinds:
        first = first_compiling(capability)
        is_newer = first > release(used.version)
        when = (
            f"CUDA {'.'.join(map(str, first))} is the first that does"
            if is_newer
            else "its support was removed"
        )
        number = "".join(map(str, capability))
        yield problem(
            "toolkit and GPUs",
            f"nvcc of {used} does not compile for {name} (sm_{number}): {when}.",
            *(
                _matching_lines(machine, torch, find_toolkits(machine), first)
                if is_newer
                else ("# this GPU is too old for this CUDA: take torch and a toolkit of an older one",)
            ),
        )


def _matching_lines(
    machine: Machine, torch: TorchBuild, toolkits: Sequence[Toolkit], oldest: tuple[int, ...] = ()
) -> tuple[str, ...]:
    """Return the lines that put the best installed toolkit in front, installing one if none matches."""
    fitting = [
        toolkit
        for toolkit in toolkits
        if toolkit.major == major(torch.cuda) and release(toolkit.version) >= oldest
    ]
    exact = [toolkit for toolkit in fitting if short(toolkit.version) == short(torch.cuda)]
    best = next(iter([*exact, *fitting]), None)
    wanted = max(torch.cuda, ".".join(map(str, oldest)), key=release)
    root = best.root if best else f"/usr/local/cuda-{short(wanted)}"
    lines: tuple[str, ...] = exports(root, best.libraries if best else None)
    if machine.environment.get("CUDA_HOME"):  # it counts more than PATH
        lines = (f"export CUDA_HOME={root}", *lines)
    return lines if best else (install_line(wanted, machine), *lines)


def check_host_compiler(machine: Machine) -> Iterator[Finding]:
    """Look at the compiler that nvcc calls."""
    toolkit = toolkit_in_use(machine)
    newest = newest_gcc(toolkit.version) if toolkit else None
    if toolkit is None or newest is None:
        return
    compiler, subject = host_compiler(machine, toolkit), "host compiler"
    named = machine.environment.get("CC", "")
    by_cc = f", by CC={named!r}" if named else ""
    if compiler is None:
        evidence = f"nvcc needs gcc, and {named or 'it'} is not found{by_cc}."
        yield problem(subject, evidence, *_other_compiler(machine, toolkit, newest))
    elif not _is_accepted(compiler, newest):
        yield problem(
            subject,
            f"{compiler.path} is gcc {compiler.version}{by_cc}, and CUDA {toolkit.version} accepts gcc up to {newest}.",
            *_other_compiler(machine, toolkit, newest),
        )
    elif compiler.is_gcc:
        yield ok(
            subject,
            f"{compiler.path} is gcc {compiler.version}{by_cc}; CUDA {toolkit.version} accepts up to {newest}",
        )
    else:
        yield ok(
            subject, f"{compiler.path}{by_cc}, which is not gcc: {compiler.version or 'of unknown version'}"
        )


def _is_accepted(compiler: Compiler | None, newest: int) -> bool:
    if compiler is None:
        return False
    return not compiler.is_gcc or compiler.major is None or compiler.major <= newest


def _other_compiler(machine: Machine, toolkit: Toolkit, newest: int) -> tuple[str, ...]:
    """Return the lines after which nvcc calls a compiler that it accepts."""
    if not machine.environment.get("CC"):
        return link_lines(machine, toolkit, newest)
    is_enough = _is_accepted(host_compiler(machine, toolkit, with_cc=False), newest)
    return ("unset CC", *(() if is_enough else link_lines(machine, toolkit, newest)))
