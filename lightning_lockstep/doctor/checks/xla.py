"""torch-xla: its device, whether it goes with torch, and variables that it gives up."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_lockstep.doctor.findings import Finding, not_applicable, ok, problem, warning
from lightning_lockstep.doctor.machine import Machine
from lightning_lockstep.doctor.options import CheckOptions
from lightning_lockstep.doctor.registry import check
from lightning_lockstep.doctor.versions import release, short

_DEPRECATED = {
    "XLA_USE_BF16": "use precision=bf16-true",
    "XLA_DOWNCAST_BF16": "use precision=bf16-true and the strategy's downcast_bf16=true",
    "XLA_USE_FP16": "use precision=bf16-true",
    "XLA_USE_F16": "use precision=bf16-true",
    "XLA_DOWNCAST_FP16": "use precision=bf16-true and the strategy's downcast_bf16=true",
    "XLA_DOWNCAST_F16": "use precision=bf16-true and the strategy's downcast_bf16=true",
    "XRT_TPU_CONFIG": "torch-xla has PJRT since release 2.0, and XRT no more",
    "XRT_DEVICE_MAP": "torch-xla has PJRT since release 2.0, and XRT no more",
    "XRT_WORKERS": "torch-xla has PJRT since release 2.0, and XRT no more",
    "XRT_LOCAL_WORKER": "torch-xla has PJRT since release 2.0, and XRT no more",
}
_NO = ("", "0", "false")
_TPUS = ("/dev/accel*", "/dev/vfio/[0-9]*")


@check(
    name="xla",
    summary="PJRT device, runtime against torch, deprecated variables",
    why="""torch-xla is compiled against one release of torch and fails with any other. It runs on the device that
    PJRT_DEVICE names: without that it may train on the CPU of a TPU host. Variables such as XLA_USE_BF16 turn every
    float32 tensor into 16 bits, metrics and counters included, and are going away.""",
    timeout=60.0,
)
def check_xla(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Look at torch-xla and its variables.

    Args:
        machine: To look at.
        options: Not needed.
    """
    yield from _variables(machine)
    packages = machine.python.packages
    xla, torch = packages.get("torch-xla"), packages.get("torch")
    has_tpu = any(machine.glob(pattern) for pattern in _TPUS)
    if xla is None and has_tpu:
        evidence = "This host has a TPU, and torch-xla is not installed for this Python."
        yield problem("torch-xla", evidence, "pip install 'lightning-lockstep[xla]' 'torch==2.9.*' libtpu")
    elif xla is None:
        yield not_applicable("torch-xla", "It is not installed, and this host has no TPU.")
    elif release(xla)[:2] != release(torch)[:2]:
        wanted = short(xla)
        evidence = f"torch-xla {xla} is built for torch {wanted}, and torch is {torch or 'missing'}."
        yield problem("torch-xla", evidence, f"pip install 'torch=={wanted}.*' 'torch-xla=={wanted}.*'")
    else:
        yield from _device(machine, has_tpu)


def _variables(machine: Machine) -> Iterator[Finding]:
    for name, instead in _DEPRECATED.items():
        value = machine.environment.get(name, "")
        if value.lower() not in _NO:
            yield warning(name, f"It is {value!r}, and torch-xla gives it up: {instead}.", f"unset {name}")


def _device(machine: Machine, has_tpu: bool) -> Iterator[Finding]:
    asked, given = machine.environment.get("PJRT_DEVICE", ""), machine.python.packages
    if has_tpu and "libtpu" not in given and "libtpu-nightly" not in given:
        yield problem(
            "libtpu", "This host has a TPU, and its library libtpu is not installed.", "pip install libtpu"
        )
        return
    if has_tpu and asked.upper() != "TPU":
        evidence = (
            f"This host has a TPU, and PJRT_DEVICE is {asked!r}." if asked else "PJRT_DEVICE is not set."
        )
        yield warning(
            "PJRT device", f"{evidence} torch-xla may take another device.", "export PJRT_DEVICE=TPU"
        )
    probed = machine.probe("xla_devices", timeout=50.0)
    if probed.error:
        evidence = f"torch-xla finds no device (PJRT_DEVICE={asked!r}): {probed.error}"
        yield problem("PJRT device", evidence, f"export PJRT_DEVICE={'TPU' if has_tpu else 'CPU'}")
    else:
        number, kind = probed.facts.get("devices"), probed.facts.get("device_type")
        yield ok("PJRT device", f"{number} of type {kind}; torch-xla {given['torch-xla']}")
