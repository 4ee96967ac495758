"""The options of the strategy, joined with the config of DeepSpeed: what both say must be the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep.deepspeed.configuration.reading import is_given, modern_spelling, section

__all__ = ["with_named_options"]

_STAGES = (0, 1, 2, 3)
_OFFLOAD_DEVICES = ("none", "cpu", "nvme")
_DEFAULT_STAGE = 2


def with_named_options(
    config: Mapping[str, Any],
    *,
    stage: int | None,  # None: that of the config, or 2
    offload_optimizer: str | None,  # none (on the device), cpu or nvme
    offload_param: str | None,  # likewise, with stage 3
    nvme_path: str | Path | None,  # folder, where one of them is nvme
) -> dict[str, Any]:
    """Return a copy of a config that also says what the options of the strategy say."""
    faults = Faults()
    joined = modern_spelling(config)
    zero = _zero_section(joined, faults)
    _settle_stage(zero, stage, faults)
    for name, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_param)):
        _settle_device(zero, name, device, faults)
    _settle_nvme_path(zero, nvme_path, faults)
    _check_stage_suffices(zero, faults)
    faults.raise_all()
    return joined


def _zero_section(config: dict[str, Any], faults: Faults) -> dict[str, Any]:
    zero = config.get("zero_optimization")
    if zero is None or not faults.check(
        isinstance(zero, dict), "zero_optimization", zero, "a section such as {'stage': 2}"
    ):
        zero = config["zero_optimization"] = {}
    assert isinstance(zero, dict)
    return zero


def _settle_stage(zero: dict[str, Any], stage: int | None, faults: Faults) -> None:
    written = zero.get("stage")
    if not is_given(written):
        faults.check(stage is None or _is_stage(stage), "stage", stage, "one of 0, 1, 2, 3")
        zero["stage"] = _DEFAULT_STAGE if stage is None else stage
    elif faults.check(_is_stage(written), "zero_optimization.stage", written, "one of 0, 1, 2, 3"):
        _check_same("stage", stage, "zero_optimization.stage", written, faults)


def _settle_device(zero: dict[str, Any], name: str, device: str | None, faults: Faults) -> None:
    path = f"zero_optimization.{name}"
    if device is not None and not faults.choice(name, device, _OFFLOAD_DEVICES):
        device = None
    inner = zero.get(name)
    if inner is None:
        if device not in (None, "none"):
            zero[name] = {"device": device}
        return
    former = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[name]
    if former in zero:
        faults.add(
            f"zero_optimization.{former}={zero[former]!r} and {path}={inner!r}: expected one of the two; {former} is"
            f" the former name, so remove it."
        )
    if not faults.check(isinstance(inner, dict), path, inner, "a section such as {'device': 'cpu'}"):
        return
    written = inner.get("device")
    if is_given(written):
        faults.choice(f"{path}.device", written, _OFFLOAD_DEVICES)
        _check_same(name, device, f"{path}.device", written, faults)
    elif device is not None:
        inner["device"] = device


def _settle_nvme_path(zero: dict[str, Any], nvme_path: str | Path | None, faults: Faults) -> None:
    on_nvme = [name for name in ("offload_optimizer", "offload_param") if _device(zero, name) == "nvme"]
    for name in on_nvme:
        path, written = f"zero_optimization.{name}.nvme_path", zero[name].get("nvme_path")
        if not is_given(written):
            expected = "the path of a folder on the NVMe drive, as the device of this section is 'nvme'"
            if faults.check(nvme_path is not None, path, written, expected):
                zero[name]["nvme_path"] = str(nvme_path)
        elif nvme_path is not None and Path(written) != Path(nvme_path):
            _check_same("nvme_path", str(nvme_path), path, str(written), faults)
    if nvme_path is not None and not on_nvme:
        faults.add(
            f"nvme_path={str(nvme_path)!r}: expected None, as nothing is kept there. Remove it, or choose"
            " offload_optimizer='nvme' or offload_param='nvme'."
        )


def _check_stage_suffices(zero: dict[str, Any], faults: Faults) -> None:
    stage = zero["stage"]
    if not _is_stage(stage):
        return
    for name in ("offload_optimizer", "offload_param"):
        device = _device(zero, name)
        if device == "none" or device not in _OFFLOAD_DEVICES:
            continue
        if name == "offload_optimizer" and device == "cpu":
            least, advice = 1, "stage 1, 2 or 3, which partition the optimizer states"
        else:  # DeepSpeed's stages 1 and 2 keep nothing on NVMe, and do not say so
            least, advice = 3, "stage 3, the only one that can"
        if stage < least:
            faults.add(f"{name}={device!r} with stage={stage}: expected {advice}, or {name}='none'.")


def _check_same(name: str, given: object, path: str, written: object, faults: Faults) -> None:
    if given is not None and given != written:
        faults.add(
            f"{name}={given!r} and {path}={written!r} in the config: expected the same value in both, or only one"
            " of the two."
        )


def _device(zero: dict[str, Any], name: str) -> object:
    return section(zero, name).get("device")


def _is_stage(stage: object) -> bool:
    return is_whole(stage) and stage in _STAGES
