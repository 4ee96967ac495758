"""DeepSpeed's configuration: read, joined with options, completed from the Trainer, and parsed by DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_lockstep._settings import Faults, did_you_mean
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.steps.patching import replaced

# -- As the user has written it: https://www.deepspeed.ai/docs/config-json --

#: What stands for a value that is filled in from the Trainer, the loader or the module, or is DeepSpeed's default.
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
_DEFAULT_STAGE = 2
# The first is the product of the others and the number of ranks.
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# Sections in which DeepSpeed ignores a key that it does not know.
_UNCHECKED = ("activation_checkpointing", "aio", "optimizer", "scheduler")
_UNKNOWN = "DeepSpeed has no such key in this section."
_NEVER = 10**12  # steps between two prints of DeepSpeed


def read_config(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """Return a copy of a configuration, or of what a JSON file holds, without what is null."""
    given = _content_of(Path(config)) if isinstance(config, (str, Path)) else config
    if not isinstance(given, (Mapping, type(None))):
        raise ConfigurationError(
            f"config={given!r}: expected a mapping such as {{'zero_optimization': {{'stage': 2}}}}, the path of a JSON"
            " file that holds one, or None."
        )
    read: dict[str, Any] = _plain(given or {})
    if "bfloat16" in read:  # DeepSpeed's former name, which Lightning does not know
        read.setdefault("bf16", read.pop("bfloat16"))
    return read


def _content_of(path: Path) -> object:
    # As DeepSpeed reads it, comments included, and keys that occur twice refused.
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    try:
        return hjson.loads(path.read_text(encoding="utf-8"), object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"config={str(path)!r}: {error}. Expected the path of a JSON file with a configuration of DeepSpeed."
        ) from error


def _plain(value: Any, key: str = "") -> Any:
    """Return a value in plain containers, without nulls but in the parameters of optimizers and schedulers."""
    if isinstance(value, Mapping):
        return {name: _plain(one, name) for name, one in value.items() if one is not None or key == "params"}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(inner) for inner in value]
    return value  # process groups and dtypes, which some keys hold, are not copied


def section(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Return a section of a configuration by the way to it, or an empty one if there is none."""
    for name in names:
        inner = config.get(name)
        config = inner if isinstance(inner, Mapping) else {}
    return config


def is_given(value: object) -> bool:
    """Return whether a configuration says something with this value: neither nothing nor ``"auto"``."""
    return value is not None and value != AUTO


# -- Joined with the options of the strategy: what both say must be the same --


def with_named_options(
    config: Mapping[str, Any],  # plain containers
    *,
    stage: int | None,  # None: that of the configuration, or 2
    offload_optimizer: str | None,  # none (on the device), cpu or nvme
    offload_param: str | None,
    nvme_path: str | Path | None,  # folder, if one of them is nvme
) -> dict[str, Any]:
    """Return a configuration that also says what the options of the strategy say."""
    faults, joined = Faults(), dict(config)
    zero = joined.get("zero_optimization", {})
    if isinstance(zero, bool):  # DeepSpeed's former spelling
        zero = {"stage": int(zero)}
    if not isinstance(zero, Mapping):
        raise ConfigurationError(f"zero_optimization={zero!r}: expected a section such as {{'stage': 2}}.")
    joined["zero_optimization"] = zero = dict(zero)
    _settle(zero, "stage", stage, f"stage={stage!r} of the strategy", faults, path="zero_optimization.")
    if not is_given(zero.get("stage")):
        zero["stage"] = _DEFAULT_STAGE
    uses_nvme = False
    for name, device in (("offload_optimizer", offload_optimizer), ("offload_param", offload_param)):
        inner = zero.get(name, {})
        if not isinstance(inner, Mapping) or (not inner and device in (None, "none")):
            continue
        zero[name] = inner = dict(inner)
        path = f"zero_optimization.{name}."
        _settle(inner, "device", device, f"{name}={device!r} of the strategy", faults, path=path)
        if inner.get("device") == "nvme":
            uses_nvme = True
            folder = None if nvme_path is None else str(nvme_path)
            _settle(inner, "nvme_path", folder, f"nvme_path={folder!r} of the strategy", faults, path=path)
            found = inner.get("nvme_path")
            faults.check(is_given(found), "nvme_path", found, f"a folder, because {name} is 'nvme'")
    expected = "None, because neither offload_optimizer nor offload_param is 'nvme'"
    faults.check(nvme_path is None or uses_nvme, "nvme_path", str(nvme_path), expected)
    faults.raise_all()
    return joined


def _settle(inner: dict[str, Any], key: str, given: object, other: str, faults: Faults, *, path: str = "") -> None:
    """Set a value that ``other`` gives; add a line if the configuration gives another one."""
    if given is None:
        return
    if is_given(written := inner.get(key)) and written != given:
        both = f"{path}{key}={written!r} in the config and {other}"
        faults.add(f"{both}: expected one of the two, or the same in both.")
    inner[key] = given


# -- Completed from the Trainer: what both say must be the same --

#: Section of the configuration that a precision of Lightning switches on; ``None`` for neither.
PRECISIONS: Mapping[str, str | None] = {
    "32-true": None,
    "16-mixed": "fp16",
    "16-true": "fp16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
}
_PRECISION_OF = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True, kw_only=True)
class TrainerValues:
    """What the Trainer and the loader say that a configuration says too; ``None`` for what is not given or known."""

    precision: str | None = None  # Lightning's name, such as bf16-mixed
    accumulate_grad_batches: int | None = None  # batches for one step of the optimizer
    gradient_clip_val: float | None = None  # largest norm of the gradients
    batch_size: int | None = None  # samples in a batch of one rank


def precision_of(config: Mapping[str, Any]) -> str | None:
    """Return what a configuration asks for, ``16-mixed`` or ``bf16-mixed``; ``None`` for neither or both."""
    on = [name for name in _PRECISION_OF if section(config, name).get("enabled") is True]
    return _PRECISION_OF[on[0]] if len(on) == 1 else None


def completed(config: Mapping[str, Any], values: TrainerValues, world_size: int) -> dict[str, Any]:
    """Return a configuration that has the Trainer's values and is parsed by DeepSpeed, without contradictions."""
    faults = Faults()
    full = _with_trainer(config, values, faults)
    if faults.texts:  # else DeepSpeed would also refuse them, by names that the user did not write
        full = without_auto(config)
    full.setdefault("gradient_clipping", 0.0)
    full.setdefault("zero_allow_untested_optimizer", True)
    full.setdefault("steps_per_print", _NEVER)
    if "train_batch_size" not in full:
        full.setdefault("train_micro_batch_size_per_gpu", 1)
        full.setdefault("gradient_accumulation_steps", 1)
    if all(faults.number(name, full.get(name, 1), least=1) for name in _SIZES):
        read = parsed(full, world_size, faults)
    faults.raise_all()
    for name in _SIZES:
        full[name] = getattr(read, name)  # without faults it was parsed
    return full


def _with_trainer(config: Mapping[str, Any], values: TrainerValues, faults: Faults) -> dict[str, Any]:
    """Return a configuration with what the Trainer says; add a line for each thing that both say differently."""
    full: dict[str, Any] = without_auto(config)
    for key, name, owner in (
        ("gradient_accumulation_steps", "accumulate_grad_batches", "Trainer"),
        ("gradient_clipping", "gradient_clip_val", "Trainer"),
        ("train_micro_batch_size_per_gpu", "batch_size", "training loader"),
    ):
        given = getattr(values, name)
        _settle(full, key, given, f"{name}={given!r} of the {owner}", faults)
    if values.precision is not None:
        wanted, other = PRECISIONS.get(values.precision), f"precision={values.precision!r} of the Trainer"
        # torch_autocast lowers the precision too, and may stand beside float32 alone.
        for name in (*_PRECISION_OF, "torch_autocast") if wanted is not None else _PRECISION_OF:
            inner = dict(section(full, name))
            _settle(inner, "enabled", name == wanted, other, faults, path=f"{name}.")
            if name == wanted:
                full[name] = inner
    return full


def without_auto(value: Any, key: str = "") -> Any:
    """Return a configuration without what is "auto", which gets DeepSpeed's default; parameters are filled in later."""
    if not isinstance(value, Mapping) or key == "params":
        return value
    return {name: without_auto(inner, name) for name, inner in value.items() if inner != AUTO}


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that counts if nothing is trained."""
    return {name: config[name] for name in _OF_EVALUATION if name in config}


# -- Parsed by DeepSpeed itself --


class _Asked(dict[str, Any]):
    """A configuration that notes for which keys it is asked."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.keys_asked: dict[str, None] = {}  # in order

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked[key] = None
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.keys_asked[str(key)] = None
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # DeepSpeed asks for some keys by ``key in config.keys()``


def parsed(config: Mapping[str, Any], world_size: int, faults: Faults) -> Any:
    """Return what DeepSpeed makes of a configuration without ``auto``; add a line for what it refuses or ignores."""
    # DeepSpeed ignores keys of the top level that it does not know. Those that it knows are the ones that it asks for.
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = _Asked({"train_micro_batch_size_per_gpu": 1})
    _parse(known, world_size, Faults())
    sections = {name: _Asked(config[name]) for name in _UNCHECKED if section(config, name)}
    given = _Asked({**config, **sections})
    read = _parse(given, world_size, faults)
    for key in config:
        if key in known.keys_asked or key in given.keys_asked or key.startswith("_"):  # a comment
            continue
        nearest = did_you_mean(key, known.keys_asked)
        if key in DeepSpeedZeroConfig.model_fields:
            nearest = f" Did you mean 'zero_optimization.{key}'?"
        faults.add(f"{key}: DeepSpeed has no such key at the top level.{nearest}")
    for name, inner in sections.items():
        for key in inner if inner.keys_asked else ():  # else DeepSpeed has not reached this section
            if key not in inner.keys_asked:
                faults.add(f"{name}.{key}: {_UNKNOWN}{did_you_mean(key, inner.keys_asked)}")
    return read


def _parse(given: _Asked, world_size: int, faults: Faults) -> Any:
    """Return what DeepSpeed reads in a configuration, or None if it refuses that."""
    from deepspeed.runtime import config as parser
    from pydantic import ValidationError

    # DeepSpeed asks its process group for the number of ranks; before the ranks start there is none.
    group = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: world_size)
    try:
        with replaced(parser, dist=group):
            return parser.DeepSpeedConfig(given)
    except ValidationError as error:
        # DeepSpeed ends at the first section that it refuses, so it gets the configuration again without these keys.
        refused = [(_refuse(given, one, faults), one["loc"]) for one in error.errors()]
        if all(name for name, _ in refused):
            for name, (first, *_) in refused:
                given[name] = {key: value for key, value in given[name].items() if key != first}
            return _parse(given, world_size, faults)
    except Exception as error:  # assertions, and errors of every kind for values of another type
        key = next(reversed(given.keys_asked))  # the one that DeepSpeed could not read, if it was reading
        is_of_value = isinstance(error, (TypeError, AttributeError)) and key in given
        culprit = f"{key}={given[key]!r}" if is_of_value else "config"
        faults.add(f"{culprit}: DeepSpeed refuses it ({type(error).__name__}): {error}")
    return None


def _refuse(config: Mapping[str, Any], error: Mapping[str, Any], faults: Faults) -> str:
    """Add a line for one of pydantic's errors; return the name of the section it is in, or '' if that is not known."""
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    way, what = [str(part) for part in error["loc"]], f"DeepSpeed refuses it: {error['msg'].rstrip('.')}."
    names = [name for name, inner in config.items() if isinstance(inner, Mapping) and way and way[0] in inner]
    if not names:
        faults.add(f"{'.'.join(way) or 'config'}: {what}")
        return ""
    if error["type"] == "extra_forbidden":
        known = {key for kind in DeepSpeedConfigModel.__subclasses__() for key in kind.model_fields}
        what = f"{_UNKNOWN}{did_you_mean(way[-1], known, most=1)}"
    faults.add(f"{names[0]}.{'.'.join(way)}={error['input']!r}: {what}")
    return names[0]
