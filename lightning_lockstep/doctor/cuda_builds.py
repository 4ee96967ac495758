"""The driver and its GPUs, the CUDA that torch was built for, and whether extensions can be built."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_lockstep._text import exit_in_words
from lightning_lockstep.doctor.cuda_toolkits import (
    Compiler,
    Toolkit,
    broken_homes,
    compiles_for,
    exports,
    find_toolkits,
    first_compiling,
    host_compiler,
    install_line,
    link_lines,
    major,
    newest_gcc,
    release,
    short,
    toolkit_in_use,
)
from lightning_lockstep.doctor.machine import Machine, Probed, pci_devices
from lightning_lockstep.doctor.registry import Finding, not_applicable, ok, problem, warning

# -- What the installed torch was built for, without importing it where that can be read --


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch."""

    version: str  # empty where it is not installed
    cuda: str = ""  # CUDA that it was built with, such as ``12.8``; empty without
    is_rocm: bool = False
    is_known: bool = True  # its files name what it was built for


def torch_build(machine: Machine) -> TorchBuild:
    """Return what is known of torch from its files."""
    installed = machine.python.packages.get("torch", "")
    text = machine.read_text(f"{machine.python.folder_of('torch')}/torch/version.py") or ""
    version = _assigned(text, "__version__") or installed
    cuda = _assigned(text, "cuda")
    if not cuda and (match := re.search(r"\+cu(\d+)(\d)\b", version)):
        cuda = f"{match[1]}.{match[2]}"
    is_rocm = bool(_assigned(text, "hip")) or "+rocm" in version
    # The version of metadata has no local part where torch comes from PyPI, and then does not name CUDA.
    return TorchBuild(version, cuda, is_rocm, is_known=bool(text) or "+" in version)


def _assigned(text: str, name: str) -> str:
    match = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"\n]*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


# -- NVIDIA's driver and GPUs, as nvidia-smi shows them --

# In WSL it is not on PATH everywhere.
_PROGRAMS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
_FIELDS = (
    "index",
    "name",
    "memory.total",
    "compute_cap",
    "clocks.max.sm",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "pcie.link.width.current",
    "pci.bus_id",
)
# What an old driver knows too.
_FEW_FIELDS = ("index", "name", "memory.total")
_NVIDIA, _DISPLAYS = "0x10de", "0x03"
_SHOWN = 200


@dataclass(frozen=True)
class Driver:
    program: str | None  # nvidia-smi, None if it was not found
    version: str = ""  # such as ``570.86.15``, empty if unknown
    cuda: str = ""  # newest CUDA that it can run, such as ``12.8``, empty if unknown
    error: str = ""  # of nvidia-smi if it cannot reach the driver
    has_hardware: bool = False  # an NVIDIA GPU is plugged in, whether or not there is a driver


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory: int = 0  # in all [MiB]; 0 if unknown
    capability: tuple[int, ...] = ()  # such as ``(8, 6)``; empty if unknown
    clock: int = 0  # the highest [MHz]; 0 if unknown
    link: str = ""  # PCIe generation and lanes that it could have, such as ``4x16``; empty if unknown
    lanes: int = 0  # of PCIe, now; 0 if unknown
    bus_id: str = ""  # such as ``00000000:3b:00.0``


def driver(machine: Machine) -> Driver:
    program = next((path for name in _PROGRAMS if (path := machine.which(name))), None)
    has_hardware = _has_hardware(machine)
    if program is None:
        return Driver(None, _version_of_module(machine), has_hardware=has_hardware)
    done = machine.run([program])
    version = re.search(r"Driver Version:\s*([\d.]+)", done.output)
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", done.output)
    error = ""
    if not done.succeeded or version is None:
        printed = " ".join(f"{done.output} {done.error}".split())[:_SHOWN]
        how = "it did not answer in time" if done.timed_out else exit_in_words(done.returncode)
        error = printed or f"{how}, no output"
    return Driver(program, version[1] if version else "", cuda[1] if cuda else "", error, has_hardware)


def find_gpus(machine: Machine) -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, none if it cannot."""
    program = next((path for name in _PROGRAMS if (path := machine.which(name))), None)
    if program is None:
        return []
    for fields in (_FIELDS, _FEW_FIELDS):
        done = machine.run([program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
        if done.succeeded and (found := _rows(done.output, fields)):
            return found
    return []


def with_capabilities(gpus: Sequence[Gpu], probed: Probed) -> list[Gpu]:
    """Return GPUs with the compute capabilities that torch knows, where nvidia-smi is too old to list them."""
    devices = probed.facts.get("devices")  # of the probe ``torch_devices``
    known = [_capability_of(device) for device in devices] if isinstance(devices, list) else []
    if len(known) != len(gpus):
        return list(gpus)
    return [
        replace(gpu, capability=gpu.capability or capability)
        for gpu, capability in zip(gpus, known, strict=True)
    ]


def _capability_of(device: object) -> tuple[int, ...]:
    given = device.get("capability") if isinstance(device, dict) else None
    is_pair = isinstance(given, list) and len(given) == 2 and all(isinstance(part, int) for part in given)
    return tuple(given) if given is not None and is_pair else ()


def architectures(found: Sequence[Gpu]) -> str:
    """Return ``TORCH_CUDA_ARCH_LIST`` for some GPUs, such as ``8.6;9.0``; empty if none is known."""
    kinds = sorted({gpu.capability for gpu in found if len(gpu.capability) == 2})
    return ";".join(f"{major}.{minor}" for major, minor in kinds)


def _rows(output: str, fields: Sequence[str]) -> list[Gpu]:
    rows = []
    for cells in csv.reader(output.replace("\0", "").splitlines()):
        values = dict(zip(fields, (cell.strip() for cell in cells), strict=False))
        if len(values) == len(fields) and values["index"].isascii() and values["index"].isdigit():
            rows.append(_gpu(values))
    return rows


def _gpu(values: dict[str, str]) -> Gpu:
    generation, lanes = values.get("pcie.link.gen.max", ""), values.get("pcie.link.width.max", "")
    capability = release(values.get("compute_cap"))
    return Gpu(
        index=_number(values["index"]),
        name=values["name"],
        memory=_number(values["memory.total"]),
        capability=capability if len(capability) == 2 else (),
        clock=_number(values.get("clocks.max.sm", "")),
        link=f"{generation}x{lanes}" if _number(generation) and _number(lanes) else "",
        lanes=_number(values.get("pcie.link.width.current", "")),
        bus_id=values.get("pci.bus_id", ""),
    )


def _number(text: str) -> int:
    numbers = release(text)
    return numbers[0] if numbers else 0


def _version_of_module(machine: Machine) -> str:
    match = re.search(r"Kernel Module\D*([\d.]+)", machine.read_text("/proc/driver/nvidia/version") or "")
    return match[1] if match else ""


def _has_hardware(machine: Machine) -> bool:
    kinds = ((machine.read_text(f"{folder}/class") or "").strip() for folder in pci_devices(machine, _NVIDIA))
    return any(kind.startswith(_DISPLAYS) for kind in kinds)


# -- What builds for GPUs find: the toolkit, whether it goes with torch and compiles for the GPUs, the host
# compiler


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
