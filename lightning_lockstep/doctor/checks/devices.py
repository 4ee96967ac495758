"""GPUs that differ, or are not used as they could be."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping

from lightning_lockstep._text import size_in_words
from lightning_lockstep.doctor.cuda import find_gpus, torch_build
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning

_MIB = 2**20
# Speeds of a matrix product that differ by less than this count as equal.
_ALIKE_SPEED = 0.9
_NO_KERNELS = (
    "pip install --upgrade torch",
    "# or, if the GPU is too old for that: an older torch, or one built from source with TORCH_CUDA_ARCH_LIST",
)


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    gpus = find_gpus(machine)
    if not gpus:
        yield not_applicable("GPUs", "nvidia-smi is not found, or lists none.")
        return
    listed = (f"{gpu.index}: {gpu.name} ({size_in_words(gpu.memory * _MIB)})" for gpu in gpus)
    yield ok("GPUs", ", ".join(listed))
    by_bus = {gpu.bus_id: gpu.index for gpu in gpus}
    yield from _ranks(machine, by_bus)
    if len(gpus) > 1:
        memory = {gpu.index: size_in_words(gpu.memory * _MIB) for gpu in gpus if gpu.memory}
        yield from _compared("memory", memory, "the smallest limits the batch of all ranks")
        capability = {gpu.index: ".".join(map(str, gpu.capability)) for gpu in gpus if gpu.capability}
        yield from _compared("compute capability", capability, "the oldest limits precision")
    if torch_build(machine).cuda:
        yield from _matrix_products(machine, by_bus)


def _compared(subject: str, values: Mapping[int, str], what: str) -> Iterator[Finding]:
    """Compare what is known of GPUs, by their numbers; ``what`` a difference means."""
    if len(set(values.values())) == 1:
        yield ok(subject, f"{next(iter(values.values()))} on each")
    elif values:
        listed = ", ".join(f"{index}: {value}" for index, value in values.items())
        yield warning(subject, f"{listed}: {what}.")


def _matrix_products(machine: Machine, by_bus: Mapping[str, int]) -> Iterator[Finding]:
    subject = "matrix product"
    speeds: dict[int, float] = {}
    for entry in machine.probe("torch_devices", "--speed", timeout=50.0).entries("devices", dict):
        index, speed = by_bus.get(str(entry.get("bus_id"))), entry.get("speed")
        if "error" in entry:
            name, chosen = ("A GPU", "") if index is None else (f"GPU {index}", f" -i {index}")
            evidence = f"{name} cannot multiply two matrices: {entry['error']}"
            processes = f"nvidia-smi{chosen}  # lists the processes that use it"
            fix = _NO_KERNELS if "no kernel image" in str(entry["error"]) else (processes,)
            yield problem(subject, evidence, *fix)
        elif index is not None and isinstance(speed, (int, float)) and 0 < speed < 1e18:
            speeds[index] = speed
    if not speeds:
        return
    listed = ", ".join(f"{index}: {speeds[index] / 1e12:.1f} TFLOP/s" for index in sorted(speeds))
    slowest = min(speeds, key=lambda index: speeds[index])
    if speeds[slowest] >= _ALIKE_SPEED * max(speeds.values()):
        yield ok(subject, listed)
        return
    yield warning(
        subject,
        f"{listed}. GPU {slowest} is the slowest, and all ranks wait for it.",
        f"nvidia-smi -i {slowest} -q -d TEMPERATURE,POWER,CLOCK,PERFORMANCE",
    )


def _ranks(machine: Machine, by_bus: Mapping[str, int]) -> Iterator[Finding]:
    done = machine.run(["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid", "--format=csv,noheader"])
    rows = [row for row in csv.reader(done.output.replace("\0", "").splitlines()) if len(row) == 2]
    of_gpu = Counter(by_bus[row[0].strip().lower()] for row in rows if row[0].strip().lower() in by_bus)
    if len(by_bus) > 1 and len(of_gpu) == 1 and max(of_gpu.values()) > 1:
        ((index, number),) = of_gpu.items()
        yield warning(
            "ranks on devices",
            f"{number} processes run on GPU {index}, none on the other {len(by_bus) - 1}: the ranks chose no device.",
            "# in the program, before anything is put on a GPU: torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
            "# or let the Trainer choose: Trainer(accelerator='gpu', devices='auto')",
        )
