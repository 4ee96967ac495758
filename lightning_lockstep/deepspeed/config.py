"""DeepSpeed's configuration as it is given: a file or dictionary, and the options of the strategy."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep.errors import ConfigurationError

# -- The config of DeepSpeed as the user has written it: read, copied, in today's spelling --
# What DeepSpeed finds wrong it says on the ranks, one error at a time, and much it does not say at all.
# Here it is said before any rank starts, all at once. See https://www.deepspeed.ai/docs/config-json for the
# keys.

#: What stands in a config for a value that is to be filled in from the Trainer, the loader or the model.
AUTO = "auto"

# What an engine needs that does not train, and what divides a model while it is made.
_OF_EVALUATION = (
    "aio",
    "bf16",
    "data_types",
    "fp16",
    "steps_per_print",
    "torch_autocast",
    "weight_quantization",
    "zero_allow_untested_optimizer",
    "zero_optimization",
)


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return a copy, down to the last level, of a config or of what a JSON file holds."""
    if config is None:
        return {}
    content = _content_of(Path(config)) if isinstance(config, (str, Path)) else config
    if not isinstance(content, Mapping):
        given = str(config) if isinstance(config, Path) else config
        raise ConfigurationError(
            f"config={given!r}: expected a mapping such as {{'zero_optimization': {{'stage': 2}}}}, the path of a JSON"
            f" file that holds one, or None; this is a {type(content).__name__}."
        )
    return _copy_of(content)


def modern_spelling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config with today's names for what DeepSpeed reads under older ones too."""
    # ``zero_optimization: true`` is stage 1, ``cpu_offload`` and ``cpu_offload_param`` are the devices of
    # ``offload_optimizer`` and ``offload_param``, ``bfloat16`` is ``bf16``. Where both names are given, it
    # stays as it is if DeepSpeed refuses that, and otherwise the one that DeepSpeed uses is kept.
    modern = _copy_of(config)
    former = modern.pop("bfloat16", None)
    if former is not None and modern.get("bf16") is None:
        modern["bf16"] = former
    zero = modern.get("zero_optimization")
    if isinstance(zero, bool):
        bucket = modern.pop("allgather_size", None)
        modern["zero_optimization"] = zero = {"stage": int(zero)}
        if bucket is not None and zero["stage"]:
            zero["allgather_bucket_size"] = bucket
    if isinstance(zero, dict):
        for former, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if former in zero and zero.get(name) is None:
                zero.update({name: {"device": "cpu"}} if zero.pop(former) is True else {})
    return modern


def without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config without the keys that are null, at every level."""
    # A null says that nothing is given; DeepSpeed takes some of them so and fails over others, sections above
    # all. The parameters of an optimizer or a scheduler stay, where a null may be a value.
    return {
        key: without_nulls(value) if isinstance(value, Mapping) and key != "params" else value
        for key, value in _copy_of(config).items()
        if value is not None
    }


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:  # in today's spelling
    """Return the part of a config that counts where nothing is trained."""
    return {name: config[name] for name in _OF_EVALUATION if name in config}


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a section of a config by the way to it, or an empty one where there is none."""
    for name in names:
        inner = config.get(name)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def is_given(value: object) -> bool:
    """Return whether a config says something with this value: neither nothing nor ``"auto"``."""
    return value is not None and value != AUTO


def stage_of(config: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO that DeepSpeed reads from a config; 0 where it says none."""
    zero = config.get("zero_optimization")
    stage = int(zero) if isinstance(zero, bool) else section(config, "zero_optimization").get("stage")
    return stage if is_whole(stage) else 0


def _content_of(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(
            f"config={str(path)!r}: there is no such file, seen from {str(Path.cwd())!r}. Expected the path of a JSON"
            " file with a config of DeepSpeed; an absolute path is found from everywhere."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"config={str(path)!r}: the file cannot be read ({error}). Expected a JSON file in UTF-8."
        ) from error
    twice: dict[str, None] = {}

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                twice[key] = None
            seen[key] = value
        return seen

    content = _parsed(text, path, without_repeats)
    if twice:
        keys = ", ".join(map(repr, twice))
        raise ConfigurationError(
            f"config={str(path)!r}: keys that occur twice in one section: {keys}. Expected each key once;"
            " only the last one would count."
        )
    return content


def _parsed(text: str, path: Path, hook: Any) -> object:
    try:
        return json.loads(text, object_pairs_hook=hook)
    except json.JSONDecodeError as error:
        wrong: Any = error
    try:
        hjson: Any = importlib.import_module("hjson")
        return hjson.loads(text, object_pairs_hook=hook)
    except ImportError:
        advice = "comments and commas at the end of a section need the package hjson"
    except ValueError as error:  # behind the first comment only this reader knows what is wrong
        wrong, advice = error, "comments are allowed"
    raise ConfigurationError(
        f"config={str(path)!r}: not JSON at line {wrong.lineno}, column {wrong.colno}: {wrong.msg}. Expected a JSON"
        f" file ({advice})."
    )


def _copy_of(config: Mapping[str, Any]) -> dict[str, Any]:
    from omegaconf.errors import OmegaConfBaseException

    try:
        return {key: _plain(value) for key, value in config.items()}
    except OmegaConfBaseException as error:
        what = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"config: {what}. Expected a config in which every value is given."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(inner) for inner in value]
    return value  # process groups and dtypes, which some keys hold, are not copied


# -- The options of the strategy, joined with the config of DeepSpeed: what both say must be the same --

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
