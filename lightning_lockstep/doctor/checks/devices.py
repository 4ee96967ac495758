"""GPUs that differ, or are not used as they could be."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning_lockstep._text import size_in_words
from lightning_lockstep.doctor.cuda import Gpu, find_gpus, torch_build
from lightning_lockstep.doctor.machine import Machine, release
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    check,
    not_applicable,
    ok,
    problem,
    warning,
)

_MIB = 2**20
# Clocks, and the speed of a matrix product, that differ by less than this are alike.
_ALIKE_CLOCKS, _ALIKE_SPEED = 0.95, 0.9
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")

# With these srun gives each task devices of its own.
_BOUND_BY_SLURM = (
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_TRES_BIND",
    "SLURM_TRES_PER_TASK",
)


@check(
    name="devices",
    summary="unequal GPUs: memory, capability, clocks, link, NUMA, measured speed; all ranks on device 0",
    why="""The ranks wait for each other at every step: the GPU with the least memory limits the batch of all, and the
    slowest one the speed of all. A GPU in a slot of fewer lanes, or one that is too hot, is slow without any error.
    Ranks that never chose a device all run on device 0, while the others are idle.""",
    needs_ranks=True,
    timeout=60.0,
)
def check_devices(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Compare the GPUs of this host."""
    gpus = find_gpus(machine)
    if not gpus:
        yield not_applicable("GPUs", "nvidia-smi is not found, or lists none.")
        return
    yield ok(
        "GPUs", ", ".join(f"{gpu.index}: {gpu.name} ({size_in_words(gpu.memory * _MIB)})" for gpu in gpus)
    )
    yield from _ranks(machine, gpus)
    measured = _measured(machine, gpus)
    if len(gpus) > 1:
        yield from _differences(gpus)
        yield _numa(machine, gpus)
    yield from _lanes(gpus)
    yield from _speeds(gpus, measured)
    if len(gpus) > 1:
        yield from _balance(gpus, measured)


def _differences(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    kinds: tuple[tuple[str, Callable[[Gpu], Any], Callable[[Any], str], str], ...] = (
        (
            "memory",
            lambda c: c.memory,
            lambda v: size_in_words(v * _MIB),
            "the smallest limits the batch of all ranks",
        ),
        (
            "compute capability",
            lambda c: c.capability,
            lambda v: ".".join(map(str, v)),
            "the oldest limits precision",
        ),
        ("clocks", lambda c: c.clock, lambda v: f"{v} MHz", "the slowest limits the speed of all ranks"),
        ("link", lambda c: c.link, lambda v: f"PCIe {v}", "the slowest limits the all-reduce"),
    )
    for subject, value_of, shown, what in kinds:
        values = {gpu.index: value_of(gpu) for gpu in gpus if value_of(gpu)}
        if not values:
            continue
        distinct = list(dict.fromkeys(values.values()))
        if len(distinct) == 1 or (subject == "clocks" and min(distinct) >= _ALIKE_CLOCKS * max(distinct)):
            yield ok(subject, f"{shown(distinct[0])} on each")
        else:
            listed = ", ".join(f"{index}: {shown(value)}" for index, value in values.items())
            yield warning(subject, f"{listed}: {what}.")


def _numa(machine: Machine, gpus: Sequence[Gpu]) -> Finding:
    nodes: dict[str, list[int]] = {}
    for gpu in gpus:
        address = gpu.bus_id.lower()[-12:]  # nvidia-smi writes 8 digits of the domain, the kernel 4
        text = (machine.read_text(f"/sys/bus/pci/devices/{address}/numa_node") or "").strip()
        nodes.setdefault(text if release(text) else "?", []).append(gpu.index)
    listed = "; ".join(f"node {node}: GPU {', '.join(map(str, found))}" for node, found in nodes.items())
    if len(nodes) > 1 and "?" not in nodes:
        return ok("NUMA", f"{listed}. Ranks do best on cores of the same node: strategy.bind_cores=true")
    return ok("NUMA", "all on one node, or not known" if "?" in nodes else listed)


def _lanes(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    for gpu in gpus:
        most = release(gpu.link.partition("x")[2])
        if most and gpu.lanes and gpu.lanes < most[0]:
            yield warning(
                "link",
                f"GPU {gpu.index} uses {gpu.lanes} of {most[0]} lanes of PCIe: the slot has fewer lanes, or the GPU is"
                " not seated properly.",
                "nvidia-smi -q -d PERFORMANCE,CLOCK && sudo lspci -vv | grep -A40 NVIDIA | grep LnkSta",
            )


def _measured(machine: Machine, gpus: Sequence[Gpu]) -> list[Mapping[str, Any]]:
    if not torch_build(machine).cuda:
        return []
    found = machine.probe("torch_devices", "--speed", timeout=50.0).facts.get("devices")
    entries: list[Mapping[str, Any]] = (
        [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []
    )
    return entries if len(entries) == len(gpus) else []


def _speeds(gpus: Sequence[Gpu], measured: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for gpu, entry in zip(gpus, measured, strict=False):
        if "error" in entry:
            evidence = f"GPU {gpu.index} cannot multiply two matrices: {entry['error']}"
            yield problem(
                "matrix product", evidence, f"nvidia-smi -i {gpu.index}  # lists the processes that use it"
            )
    speeds = _speed_of_each(gpus, measured)
    if not speeds:
        return
    listed = ", ".join(f"{index}: {speed / 1e12:.1f} TFLOP/s" for index, speed in speeds.items())
    slowest = min(speeds, key=lambda index: speeds[index])
    if speeds[slowest] < _ALIKE_SPEED * max(speeds.values()):
        yield warning(
            "matrix product",
            f"{listed}. GPU {slowest} is the slowest, and all ranks wait for it.",
            f"nvidia-smi -i {slowest} -q -d TEMPERATURE,POWER,CLOCK,PERFORMANCE",
        )
    else:
        yield ok("matrix product", listed)


def _speed_of_each(gpus: Sequence[Gpu], measured: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    pairs = zip(gpus, measured, strict=False)
    return {
        gpu.index: float(entry["speed"])
        for gpu, entry in pairs
        if isinstance(entry.get("speed"), (int, float)) and 0 < entry["speed"] < 1e18
    }


def _balance(gpus: Sequence[Gpu], measured: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Say which share of a batch each GPU would need for all to be ready at once."""
    speeds = _speed_of_each(gpus, measured)
    if len(speeds) < len(gpus) or min(speeds.values()) >= _ALIKE_SPEED * max(speeds.values()):
        return
    total = sum(speeds.values())
    weights = ", ".join(f"{index}: {speed / total:.2f}" for index, speed in speeds.items())
    yield ok("batch weights", f"parts of a global batch with which all would be ready at once: {weights}")


def _ranks(machine: Machine, gpus: Sequence[Gpu]) -> Iterator[Finding]:
    done = machine.run(["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid", "--format=csv,noheader"])
    rows = [row for row in csv.reader(done.output.replace("\0", "").splitlines()) if len(row) == 2]
    by_bus = {gpu.bus_id.lower(): gpu.index for gpu in gpus if gpu.bus_id}
    of_gpu = Counter(by_bus[row[0].strip().lower()] for row in rows if row[0].strip().lower() in by_bus)
    if len(gpus) > 1 and len(of_gpu) == 1 and max(of_gpu.values()) > 1:
        ((index, number),) = of_gpu.items()
        yield warning(
            "ranks on devices",
            f"{number} processes run on GPU {index}, none on the other {len(gpus) - 1}: the ranks chose no device.",
            "# in the program, before anything is put on a GPU: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            "# or let the Trainer choose: Trainer(accelerator='gpu', devices='auto')",
        )
    yield from _visible(machine)


def _visible(machine: Machine) -> Iterator[Finding]:
    shown = machine.environment.get("CUDA_VISIBLE_DEVICES")
    given = {name: release(machine.environment.get(name)) for name in _LOCAL_RANKS}
    ranks = next((number[0] for number in given.values() if number), 1)
    if shown is None or any(machine.environment.get(name) for name in _BOUND_BY_SLURM):
        return  # each rank is shown another device
    visible = [part for part in shown.split(",") if part.strip()]
    if len(visible) < ranks:
        yield problem(
            "ranks on devices",
            f"CUDA_VISIBLE_DEVICES={shown!r} shows {len(visible)} of the GPUs to {ranks} ranks of this host.",
            "unset CUDA_VISIBLE_DEVICES",
        )
