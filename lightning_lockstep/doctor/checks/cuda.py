"""CUDA: driver, torch's build, toolkits of the system, the host compiler, and the architectures of the GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from lightning_lockstep._text import counted
from lightning_lockstep.doctor.cuda import (
    Driver,
    Gpu,
    Toolkit,
    TorchBuild,
    exports,
    find_driver,
    find_gpus,
    find_toolkits,
    has_cudart,
    host_compiler,
    install_line,
    lines_for_gcc,
    newest_gcc,
    toolkit_in_use,
    torch_build,
)
from lightning_lockstep.doctor.machine import Machine, major, release, short, system_install
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning

_NEW_DRIVER = "sudo ubuntu-drivers install && sudo reboot  # or: sudo dnf module install nvidia-driver:latest-dkms"
_ASK_TORCH = "python -c 'import torch; torch.cuda.init()'"


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    torch, driver, used = torch_build(machine), find_driver(machine), toolkit_in_use(machine)
    gpus = find_gpus(machine) if not driver.error else []
    yield _driver(driver, gpus)
    is_too_old = bool(driver.cuda) and major(driver.cuda) < major(torch.cuda)
    yield _old_driver(torch, driver) if is_too_old else _torch(torch, gpus)
    homes = {name: home for name in ("CUDA_HOME", "CUDA_PATH") if (home := machine.environment.get(name))}
    broken = {name: home for name, home in homes.items() if not machine.exists(f"{home}/bin/nvcc")}
    toolkits = find_toolkits(machine)
    yield from _toolkits(machine, torch, toolkits, used)
    if toolkits and torch.cuda and not broken:
        yield _match(torch, used, _matching_lines(machine, torch, toolkits))
    for name, home in broken.items():
        evidence = f"Set to {home}, but there is no {home}/bin/nvcc: builds look only there."
        yield warning(name, evidence, f"unset {name}", "lockstep-doctor cuda  # what is found without it")
    yield from _folders(machine, used)
    if used is not None and (newest := newest_gcc(used.version)) is not None:
        yield _host_compiler(machine, used, newest)
    if torch.cuda and gpus and not is_too_old:
        yield from _architectures(machine, gpus)


# -- The driver, and the CUDA that torch was built for --


def _driver(driver: Driver, gpus: Sequence[Gpu]) -> Finding:
    subject, version = "driver", driver.version
    if driver.error:
        # The driver was updated while it was loaded.
        fix = "sudo reboot" if "mismatch" in driver.error else "sudo modprobe nvidia && nvidia-smi"
        return problem(subject, f"nvidia-smi does not reach the driver: {driver.error}", fix)
    if driver.program is None and version:
        evidence = f"The module of driver {version} is loaded, and nvidia-smi is not found."
        fix = system_install(f"nvidia-utils-{short(version, 1)}", "nvidia-driver-cuda")
        return warning(subject, evidence, fix)
    if driver.program is None and driver.has_hardware:
        evidence = "There is an NVIDIA GPU and no driver for it: nvidia-smi is not found."
        return problem(subject, evidence, _NEW_DRIVER)
    if driver.program is None:
        evidence = "There is no NVIDIA GPU: neither nvidia-smi nor a device on the PCI bus."
        return not_applicable(subject, evidence)
    if not gpus:
        fix = "# in a container: docker run --gpus all ...; under Slurm: srun --gpus=1 ..."
        return problem(subject, f"Driver {version} is loaded, and nvidia-smi lists no GPU.", fix)
    kinds = ", ".join(dict.fromkeys(gpu.name for gpu in gpus))
    runs = f"{version}, runs CUDA up to {driver.cuda or '?'}"
    return ok(subject, f"{runs}; {counted(len(gpus), 'GPU')}: {kinds}")


def _old_driver(torch: TorchBuild, driver: Driver) -> Finding:
    return problem(
        "driver and torch",
        f"torch {torch.version} is built for CUDA {torch.cuda}, and driver {driver.version} runs CUDA up to"
        f" {driver.cuda}: the major version decides.",
        _NEW_DRIVER,
        f"# or, without a new driver, a torch that is built for CUDA {major(driver.cuda)}",
    )


def _torch(torch: TorchBuild, gpus: Sequence[Gpu]) -> Finding:
    subject = "torch's CUDA"
    if not torch.version:
        return not_applicable(subject, "torch is not installed for this Python.")
    if torch.cuda:
        return ok(subject, f"torch {torch.version} is built for CUDA {torch.cuda}")
    if not gpus:
        return not_applicable(subject, f"torch {torch.version} is built without CUDA, and there is no GPU.")
    return problem(
        subject,
        f"torch {torch.version} is built without CUDA and cannot use the GPUs of this host.",
        f"pip install --force-reinstall torch=={torch.version.partition('+')[0]}",
    )


# -- What builds for GPUs find: the toolkit, and whether it goes with torch; few runs build, so these are warnings --


def _toolkits(
    machine: Machine, torch: TorchBuild, toolkits: Sequence[Toolkit], used: Toolkit | None
) -> Iterator[Finding]:
    subject = "toolkits"
    own = f"There is none. torch runs with its own CUDA {torch.cuda};"
    if toolkits:
        listed = (f"{toolkit}{' <- found first' if toolkit == used else ''}" for toolkit in toolkits)
        yield ok(subject, "; ".join(listed))
    elif not torch.cuda:
        yield not_applicable(subject, "There is none, and torch needs none.")
    elif "deepspeed" not in machine.python.packages:
        yield not_applicable(subject, f"{own} builds such as DeepSpeed's need one.")
    else:
        lines = exports(f"/usr/local/cuda-{short(torch.cuda)}")
        evidence = f"{own} DeepSpeed's operations cannot be compiled."
        yield warning(subject, evidence, install_line(torch.cuda), *lines)


def _match(torch: TorchBuild, used: Toolkit | None, fix: Sequence[str]) -> Finding:
    subject = "toolkit and torch"
    if used is None:
        evidence = "nvcc is not found: neither on PATH nor in /usr/local/cuda, where builds look for CUDA."
        return warning(subject, evidence, *fix)
    if major(used.version) != major(torch.cuda):
        return warning(
            subject,
            f"{used} is found first, and torch is built for CUDA {torch.cuda}: the major versions differ, so"
            " extensions compiled here do not work with torch.",
            *fix,
        )
    may = "" if short(used.version) == short(torch.cuda) else ": the minor versions may differ"
    return ok(subject, f"{used} and torch's CUDA {torch.cuda}{may}")


def _matching_lines(machine: Machine, torch: TorchBuild, toolkits: Sequence[Toolkit]) -> tuple[str, ...]:
    """Return the lines that put the best installed toolkit in front, installing one if none matches."""
    fitting = [toolkit for toolkit in toolkits if major(toolkit.version) == major(torch.cuda)]
    exact = [toolkit for toolkit in fitting if short(toolkit.version) == short(torch.cuda)]
    best = next(iter([*exact, *fitting]), None)
    root = best.root if best else f"/usr/local/cuda-{short(torch.cuda)}"
    lines: tuple[str, ...] = exports(root, best.libraries if best else None)
    if machine.environment.get("CUDA_HOME"):  # it counts more than PATH
        lines = (f"export CUDA_HOME={root}", *lines)
    return lines if best else (install_line(torch.cuda), *lines)


# -- ``PATH`` and ``LD_LIBRARY_PATH``, as far as they name CUDA: whether the folders exist, contain it, and agree --


def _folders(machine: Machine, used: Toolkit | None) -> Iterator[Finding]:
    shown = []
    for name in ("PATH", "LD_LIBRARY_PATH"):
        folders = machine.environment.get(name, "").split(":")
        of_cuda = [folder for folder in folders if "cuda" in folder.lower()]
        missing = [folder for folder in of_cuda if not machine.exists(folder)]
        if missing:
            rest = ":".join(folder for folder in folders if folder not in missing)
            evidence = f"It names folders that do not exist: {', '.join(missing)}."
            yield warning(name, evidence, f"export {name}={rest or repr('')}")
        if of_cuda:
            shown.append(ok(name, f"{' before '.join(of_cuda)} (of {len(folders)} in all)"))
    if used is not None:
        yield from _libraries(machine, used)
        yield from shown


def _libraries(machine: Machine, used: Toolkit) -> Iterator[Finding]:
    """Compare the first libcudart of LD_LIBRARY_PATH with the toolkit that is used."""
    name, fix = "LD_LIBRARY_PATH", exports(used.root, used.libraries)
    folders = [folder for folder in machine.environment.get(name, "").split(":") if folder]
    for folder in folders:
        is_of_toolkit = re.search(r"/cuda[^/]*/(lib64|lib|targets/[^/]+/lib)/?$", folder)
        if is_of_toolkit and machine.exists(folder) and not has_cudart(machine, folder):
            evidence = f"{folder} contains no libcudart.so: the toolkit is incomplete, or the path is wrong."
            yield warning(name, evidence, *fix)
    first = next((folder for folder in folders if has_cudart(machine, folder)), None)
    files = machine.glob(f"{first.rstrip('/')}/libcudart.so.*") if first else []
    version = max((file.rpartition(".so.")[2] for file in files), default="", key=release)
    if version and major(version) != major(used.version):
        yield warning(
            name,
            f"{first} comes first there, and the compiler is that of {used}: programs load libraries of another CUDA"
            " than they are built with.",
            *fix,
        )


# -- The compiler that nvcc calls --


def _host_compiler(machine: Machine, used: Toolkit, newest: int) -> Finding:
    compiler, subject = host_compiler(machine, used), "host compiler"
    named = machine.environment.get("CC", "")
    by_cc = f", by CC={named!r}" if named else ""
    if compiler is not None and not compiler.is_gcc:
        version = compiler.version or "of unknown version"
        return ok(subject, f"{compiler.path}{by_cc}, which is not gcc: {version}")
    if compiler is None:
        evidence = f"nvcc needs gcc, and {named or 'it'} is not found{by_cc}."
    else:
        evidence = f"{compiler.path} is gcc {compiler.version}{by_cc}"
        if major(compiler.version) <= newest:
            return ok(subject, f"{evidence}; CUDA {used.version} accepts up to {newest}")
        evidence += f", and CUDA {used.version} accepts gcc up to {newest}."
    return warning(subject, evidence, *lines_for_gcc(machine, used, newest))


# -- The architectures for which torch has kernels --


def _architectures(machine: Machine, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    asked, subject = machine.probe("torch_devices", timeout=50.0), "architectures"
    if asked.error:
        yield problem(subject, f"torch cannot be asked: {asked.error}", _ASK_TORCH)
        return
    built = asked.entries("architectures", str)
    if not built:
        shown = machine.environment.get("CUDA_VISIBLE_DEVICES")
        evidence = "torch finds no usable GPU, though nvidia-smi lists some; CUDA_VISIBLE_DEVICES is"
        evidence += " not set." if shown is None else f" {shown!r}."
        yield problem(subject, evidence, _ASK_TORCH if shown is None else "unset CUDA_VISIBLE_DEVICES")
        return
    kinds = sorted({".".join(map(str, gpu.capability)) for gpu in gpus if gpu.capability})
    yield ok(subject, f"GPUs of {', '.join(kinds) or 'unknown capability'}; torch has {' '.join(built)}")
