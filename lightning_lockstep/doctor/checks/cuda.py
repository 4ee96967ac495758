"""CUDA: driver, torch's build, toolkits of the system, the host compiler, and the architectures of the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_lockstep.doctor.compilers import host_compiler, link_lines, newest_gcc
from lightning_lockstep.doctor.cuda_variables import broken_homes, check_variables
from lightning_lockstep.doctor.findings import Finding, Status, not_applicable, ok, problem, warning
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.nvidia import Driver, Gpu, driver, find_gpus, with_capabilities
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.registry import check
from lightning_lockstep.doctor.toolkits import Toolkit, exports, find_toolkits, install_line, toolkit_in_use
from lightning_lockstep.doctor.torch_build import TorchBuild, torch_build
from lightning_lockstep.doctor.versions import release, short

# Oldest driver that runs a CUDA of this major version.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


@check(
    name="cuda",
    summary="driver, torch's CUDA, toolkits of the system and which one is found, host compiler, architectures",
    why="""torch brings its own CUDA. What is compiled here, such as the operations of DeepSpeed, is compiled by the
    toolkit of the system that PATH or CUDA_HOME finds, and the two must be of one major version. With several toolkits
    the first on PATH and LD_LIBRARY_PATH wins. Each CUDA accepts compilers up to some version only. And torch has
    kernels for the architectures it was built for: on other GPUs every operation fails.""",
    timeout=60.0,
)
def check_cuda(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Look at driver, torch, toolkits, compiler and architectures.

    Args:
        machine: To look at.
        options: Not needed.
    """
    torch, found = torch_build(machine), driver(machine)
    gpus = find_gpus(machine) if not found.error else []
    yield from _driver(machine, found, gpus)
    if torch.is_rocm:
        yield not_applicable("torch's CUDA", f"torch {torch.version} is built for ROCm.")
        return
    yield from _torch(torch, found, gpus)
    has_gpu = found.program is not None or bool(found.version) or found.has_hardware
    yield from _toolkits(machine, torch, has_gpu)
    yield from check_variables(machine)
    yield from _compiler(machine)
    if torch.cuda and gpus:
        yield from _architectures(machine, gpus)


def _driver(machine: Machine, found: Driver, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if found.error:
        # The driver was updated while it was loaded.
        fix = "sudo reboot" if "mismatch" in found.error else "sudo modprobe nvidia && nvidia-smi"
        yield problem(
            "driver",
            f"nvidia-smi does not reach the driver: {found.error}",
            fix,
        )
    elif found.program is None and found.version:
        evidence = f"The module of driver {found.version} is loaded, and nvidia-smi is not found."
        fix = f"sudo apt-get install nvidia-utils-{short(found.version, 1)}"
        yield warning("driver", evidence, fix)
    elif found.program is None and found.has_hardware:
        evidence = "There is a GPU of NVIDIA and no driver for it: nvidia-smi is not found."
        has_dnf = machine.which("apt-get") is None and machine.which("dnf") is not None
        install = "dnf module install nvidia-driver:latest-dkms" if has_dnf else "ubuntu-drivers install"
        yield problem("driver", evidence, f"sudo {install} && sudo reboot")
    elif found.program is None:
        yield not_applicable(
            "driver", "There is no GPU of NVIDIA: neither nvidia-smi nor a device on the PCI bus."
        )
    elif not gpus:
        evidence = f"Driver {found.version} is loaded, and nvidia-smi lists no GPU."
        yield problem(
            "driver", evidence, "# in a container: docker run --gpus all ...; under Slurm: srun --gpus=1 ..."
        )
    else:
        kinds = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
        yield ok(
            "driver", f"{found.version}, runs CUDA up to {found.cuda or '?'}; {len(gpus)} GPU(s): {kinds}"
        )


def _torch(torch: TorchBuild, found: Driver, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if not torch.version:
        yield not_applicable("torch's CUDA", "torch is not installed for this Python.")
    elif not torch.cuda and gpus:
        plain = torch.version.partition("+")[0]
        yield problem(
            "torch's CUDA",
            f"torch {torch.version} is built without CUDA and uses none of the {len(gpus)} GPU(s).",
            f"pip install --force-reinstall torch=={plain}",
        )
    elif not torch.cuda:
        yield not_applicable(
            "torch's CUDA", f"torch {torch.version} is built without CUDA, and there is no GPU."
        )
    elif found.cuda and _major(found.cuda) < _major(torch.cuda):
        oldest = _OLDEST_DRIVER.get(_major(torch.cuda))
        yield problem(
            "driver and torch",
            f"torch {torch.version} is built for CUDA {torch.cuda}, and driver {found.version} runs CUDA up to"
            f" {found.cuda}: the major version decides.",
            f"sudo apt-get install nvidia-driver-{oldest} && sudo reboot"
            if oldest
            else "sudo ubuntu-drivers install",
            f"# or, without a new driver, a torch that is built for CUDA {_major(found.cuda)}",
        )
    else:
        yield ok("torch's CUDA", f"torch {torch.version} is built for CUDA {torch.cuda}")


def _toolkits(machine: Machine, torch: TorchBuild, has_gpu: bool) -> Iterator[Finding]:
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
        found = _match(machine, torch, toolkits, used)
        # Runs on this host do not need what is compiled for a GPU.
        yield (
            found if has_gpu or found.status is not Status.PROBLEM else replace(found, status=Status.WARNING)
        )


def _match(machine: Machine, torch: TorchBuild, toolkits: Sequence[Toolkit], used: Toolkit | None) -> Finding:
    subject, wanted = "toolkit and torch", _major(torch.cuda)
    fix = _matching_lines(machine, torch, toolkits)
    if used is None:
        return warning(
            subject, "No toolkit is on PATH: nvcc is not found, and builds do not find CUDA.", *fix
        )
    if used.major is None:
        fix = (f"{used.root}/bin/nvcc --version", *fix)
        return warning(subject, f"nvcc of {used.root} does not say its version.", *fix)
    if used.major != wanted:
        return problem(
            subject,
            f"{used} is found first, and torch is built for CUDA {torch.cuda}: the major versions differ, and what is"
            " compiled here does not fit.",
            *fix,
        )
    if short(used.version) != short(torch.cuda):
        return ok(subject, f"{used} and torch's CUDA {torch.cuda}: the minor versions may differ")
    return ok(subject, f"{used} and torch's CUDA {torch.cuda}")


def _matching_lines(machine: Machine, torch: TorchBuild, toolkits: Sequence[Toolkit]) -> tuple[str, ...]:
    """Return the lines that put the best installed toolkit in front, installing one if none fits."""
    fitting = [toolkit for toolkit in toolkits if toolkit.major == _major(torch.cuda)]
    exact = [toolkit for toolkit in fitting if short(toolkit.version) == short(torch.cuda)]
    best = next(iter([*exact, *fitting]), None)
    root = best.root if best else f"/usr/local/cuda-{short(torch.cuda)}"
    lines: tuple[str, ...] = exports(root, best.libraries if best else None)
    if machine.environment.get("CUDA_HOME"):  # it counts more than PATH
        lines = (f"export CUDA_HOME={root}", *lines)
    return lines if best else (install_line(torch.cuda, machine), *lines)


def _compiler(machine: Machine) -> Iterator[Finding]:
    toolkit = toolkit_in_use(machine)
    newest = newest_gcc(toolkit.version) if toolkit else None
    if toolkit is None or newest is None:
        return
    compiler = host_compiler(machine, toolkit)
    subject = "host compiler"
    if compiler is None:
        yield problem(subject, "nvcc needs gcc, and it is not found.", *link_lines(machine, toolkit, newest))
    elif compiler.is_gcc and compiler.major is not None and compiler.major > newest:
        yield problem(
            subject,
            f"{compiler.path} is gcc {compiler.version}, and CUDA {toolkit.version} accepts gcc up to {newest}.",
            *link_lines(machine, toolkit, newest),
        )
    elif compiler.is_gcc:
        yield ok(
            subject,
            f"{compiler.path} is gcc {compiler.version}; CUDA {toolkit.version} accepts up to {newest}",
        )
    else:
        yield ok(subject, f"{compiler.path}, which is not gcc: {compiler.version or 'of unknown version'}")


def _architectures(machine: Machine, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    asked = machine.probe("torch_devices", timeout=50.0)
    subject = "architectures"
    if asked.error:
        yield problem(
            subject, f"torch cannot be asked: {asked.error}", "python -c 'import torch; torch.cuda.init()'"
        )
        return
    built = [str(name) for name in _list(asked.facts.get("architectures"))]
    if not built:
        evidence = "torch finds no usable GPU, though nvidia-smi lists some; CUDA_VISIBLE_DEVICES is"
        shown = machine.environment.get("CUDA_VISIBLE_DEVICES")
        fix = (
            "unset CUDA_VISIBLE_DEVICES"
            if shown is not None
            else "python -c 'import torch; torch.cuda.init()'"
        )
        yield problem(subject, f"{evidence} {shown!r}." if shown is not None else f"{evidence} not set.", fix)
        return
    gpus = with_capabilities(gpus, asked)
    without = [gpu for gpu in gpus if gpu.capability and not _runs_on(built, gpu.capability)]
    for name, capability in dict.fromkeys((gpu.name, gpu.capability) for gpu in without):
        yield _no_kernels(name, capability, built)
    if not without:
        kinds = sorted({".".join(map(str, gpu.capability)) for gpu in gpus if gpu.capability})
        yield ok(subject, f"GPUs of {', '.join(kinds) or 'unknown capability'}; torch has {' '.join(built)}")


def _no_kernels(name: str, capability: Sequence[int], built: Sequence[str]) -> Finding:
    number = "".join(map(str, capability))
    is_newer = all(tuple(capability) > _capability(entry) for entry in built if _capability(entry))
    return problem(
        "architectures",
        f"{name} is sm_{number}, and torch has kernels for {' '.join(built)} only: 'no kernel image is available'.",
        "pip install --upgrade torch"
        if is_newer
        else "# this GPU is too old for this torch: take an older torch, or",
        f"# build torch from its sources with TORCH_CUDA_ARCH_LIST={'.'.join(map(str, capability))!r}",
    )


def _runs_on(built: Sequence[str], capability: Sequence[int]) -> bool:
    """Return whether one of torch's architectures runs on a GPU: same major and no newer, or as PTX any older one."""
    for entry in built:
        of = _capability(entry)
        if of and of <= tuple(capability) and (entry.startswith("compute_") or of[0] == capability[0]):
            return True
    return False


def _capability(entry: str) -> tuple[int, ...]:
    match = re.fullmatch(r"(?:sm|compute)_(\d{1,3})(\d)[a-z]?", entry, re.ASCII)
    return (int(match[1]), int(match[2])) if match else ()


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _major(version: str) -> int:
    numbers = release(version)
    return numbers[0] if numbers else 0
