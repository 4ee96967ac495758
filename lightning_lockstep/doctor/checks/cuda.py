"""CUDA: driver, torch's build, toolkits of the system, the host compiler, and the architectures of the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_lockstep.doctor.cuda_builds import (
    Driver,
    Gpu,
    TorchBuild,
    check_host_compiler,
    check_toolkits,
    driver,
    find_gpus,
    torch_build,
    with_capabilities,
)
from lightning_lockstep.doctor.cuda_toolkits import check_variables, major, short
from lightning_lockstep.doctor.machine import Machine, has_dnf, system_install
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    Status,
    check,
    not_applicable,
    ok,
    problem,
    warning,
)

# Oldest driver that runs a CUDA of this major version.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_DRIVER_OF_DNF = "dnf module install nvidia-driver:latest-dkms"


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
    """Look at driver, torch, toolkits, compiler and architectures."""
    torch, found = torch_build(machine), driver(machine)
    gpus = find_gpus(machine) if not found.error else []
    yield from _driver(machine, found, gpus)
    if torch.is_rocm:
        yield not_applicable("torch's CUDA", f"torch {torch.version} is built for ROCm.")
        return
    yield from _torch(machine, torch, found, gpus)
    # Of all strategies only DeepSpeed's compile anything; and what is compiled for a GPU is not needed without one.
    is_built = options.strategy is None or options.strategy.startswith("deepspeed")
    has_gpu = found.program is not None or bool(found.version) or found.has_hardware
    yield from _weighed(check_toolkits(machine, torch, gpus), has_gpu and is_built)
    yield from check_variables(machine)
    yield from _weighed(check_host_compiler(machine), is_built)
    if torch.cuda and gpus and not _is_too_old(found, torch):
        yield from _architectures(machine, gpus)


def _weighed(findings: Iterable[Finding], is_needed: bool) -> Iterator[Finding]:
    """Yield findings about builds: where nothing is built, a problem of theirs stops no run."""
    for found in findings:
        is_less = found.status is Status.PROBLEM and not is_needed
        yield replace(found, status=Status.WARNING) if is_less else found


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
        fix = system_install(machine, f"nvidia-utils-{short(found.version, 1)}", "nvidia-driver-cuda")
        yield warning("driver", evidence, fix)
    elif found.program is None and found.has_hardware:
        evidence = "There is an NVIDIA GPU and no driver for it: nvidia-smi is not found."
        install = _DRIVER_OF_DNF if has_dnf(machine) else "ubuntu-drivers install"
        yield problem("driver", evidence, f"sudo {install} && sudo reboot")
    elif found.program is None:
        yield not_applicable(
            "driver", "There is no NVIDIA GPU: neither nvidia-smi nor a device on the PCI bus."
        )
    elif not gpus:
        evidence = f"Driver {found.version} is loaded, and nvidia-smi lists no GPU."
        yield problem(
            "driver", evidence, "# in a container: docker run --gpus all ...; under Slurm: srun --gpus=1 ..."
        )
    else:
        kinds = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
        yield ok(
            "driver", f"{found.version}, runs CUDA up to {found.cuda or '?'}; {_gpus(len(gpus))}: {kinds}"
        )


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _is_too_old(found: Driver, torch: TorchBuild) -> bool:
    return bool(found.cuda) and major(found.cuda) < major(torch.cuda)


def _newer_driver(machine: Machine, oldest: int | None) -> str:
    if has_dnf(machine):
        return f"sudo {_DRIVER_OF_DNF} && sudo reboot"
    return (
        f"sudo apt-get install nvidia-driver-{oldest} && sudo reboot"
        if oldest
        else "sudo ubuntu-drivers install"
    )


def _torch(machine: Machine, torch: TorchBuild, found: Driver, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if not torch.version:
        yield not_applicable("torch's CUDA", "torch is not installed for this Python.")
    elif not torch.cuda and not torch.is_known and gpus:
        yield warning(
            "torch's CUDA",
            f"torch {torch.version}: its version.py is not found, so it is not known for which CUDA it is built.",
            "python -c 'import torch; print(torch.__file__, torch.version.cuda)'",
        )
    elif not torch.cuda and not torch.is_known:
        yield not_applicable(
            "torch's CUDA", f"torch {torch.version}, of an unknown build, and there is no GPU."
        )
    elif not torch.cuda and gpus:
        plain = torch.version.partition("+")[0]
        yield problem(
            "torch's CUDA",
            f"torch {torch.version} is built without CUDA and cannot use the GPUs of this host.",
            f"pip install --force-reinstall torch=={plain}",
        )
    elif not torch.cuda:
        yield not_applicable(
            "torch's CUDA", f"torch {torch.version} is built without CUDA, and there is no GPU."
        )
    elif _is_too_old(found, torch):
        oldest = _OLDEST_DRIVER.get(major(torch.cuda))
        yield problem(
            "driver and torch",
            f"torch {torch.version} is built for CUDA {torch.cuda}, and driver {found.version} runs CUDA up to"
            f" {found.cuda}: the major version decides.",
            _newer_driver(machine, oldest),
            f"# or, without a new driver, a torch that is built for CUDA {major(found.cuda)}",
        )
    else:
        yield ok("torch's CUDA", f"torch {torch.version} is built for CUDA {torch.cuda}")


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
