"""torch-xla: its device, whether it matches torch, and deprecated variables."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_lockstep._text import install_command
from lightning_lockstep.doctor.machine import Machine, pci_devices, short
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning

_BF16, _DOWNCAST = "use precision=bf16-true", "use precision=bf16-true and the strategy's downcast_bf16=true"
_DEPRECATED = {
    **dict.fromkeys(("XLA_USE_BF16", "XLA_USE_FP16", "XLA_USE_F16"), _BF16),
    **dict.fromkeys(("XLA_DOWNCAST_BF16", "XLA_DOWNCAST_FP16", "XLA_DOWNCAST_F16"), _DOWNCAST),
}
_NO = ("", "0", "false")
_WITH_LIBTPU = "'torch-xla[tpu]=={}.*'"  # each torch-xla requires one version of libtpu
_NOT_LOADED = ("undefined symbol", "cannot open shared object")
# Google's other devices on the bus, such as the network card of its virtual machines, have the vendor too.
_GOOGLE = "0x1ae0"
_TPUS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076", "0x007c", "0x0083")


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    for name, instead in _DEPRECATED.items():
        value = machine.environment.get(name, "")
        if value.lower() not in _NO:
            evidence = f"Set to {value!r}, which torch-xla has deprecated: {instead}."
            yield warning(name, evidence, f"unset {name}")
    # Device files are no proof, because NPUs and VFIO have them too.
    devices = [machine.read_text(f"{folder}/device") or "" for folder in pci_devices(machine, _GOOGLE)]
    has_tpu = any(number.strip() in _TPUS for number in devices)
    if "torch-xla" in machine.python.packages:
        yield from _device(machine, has_tpu=has_tpu)
    elif has_tpu:
        evidence = "This host has a TPU, and torch-xla is not installed for this Python."
        fix = install_command("xla", "'torch==2.9.*'", _WITH_LIBTPU.format("2.9"))
        yield problem("torch-xla", evidence, fix)
    else:
        yield not_applicable("torch-xla", "It is not installed, and this host has no TPU.")


def _device(machine: Machine, *, has_tpu: bool) -> Iterator[Finding]:
    asked, given = machine.environment.get("PJRT_DEVICE", ""), machine.python.packages
    if has_tpu and "libtpu" not in given and "libtpu-nightly" not in given:
        evidence = "This host has a TPU, and its library libtpu is not installed."
        yield problem("libtpu", evidence, f"pip install {_WITH_LIBTPU.format(short(given['torch-xla']))}")
        return
    if has_tpu and asked.upper() != "TPU":
        evidence = f"This host has a TPU, and PJRT_DEVICE is {repr(asked) if asked else 'not set'}:"
        yield warning("PJRT device", f"{evidence} torch-xla may take another.", "export PJRT_DEVICE=TPU")
    probed = machine.probe("xla_devices", timeout=50.0)
    wanted = short(given["torch-xla"])
    is_for_another = wanted != short(given.get("torch")) or any(text in probed.error for text in _NOT_LOADED)
    if probed.error and is_for_another:
        yield problem(
            "torch-xla",
            f"It cannot be loaded: {probed.error}. Its binaries are those of another build of torch.",
            f"pip install --force-reinstall --no-deps 'torch=={wanted}.*' 'torch-xla=={wanted}.*'",
        )
    elif probed.error:
        evidence = f"torch-xla finds no device (PJRT_DEVICE={asked!r}): {probed.error}"
        yield problem("PJRT device", evidence, f"export PJRT_DEVICE={'TPU' if has_tpu else 'CPU'}")
    else:
        number, kind = probed.facts.get("devices"), probed.facts.get("device_type")
        yield ok("PJRT device", f"{number} of type {kind}; torch-xla {given['torch-xla']}")
