"""The keys that the installed DeepSpeed knows, and those of a configuration that it does not."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import ModuleType
from typing import Any, get_args

import torch

from lightning_lockstep._doors.deepspeed_internals import (
    config_models,
    let_read,
    optimizer_types,
    optimizers_of,
    removed_keys,
    schedulers,
)
from lightning_lockstep._settings import Faults, did_you_mean
from lightning_lockstep.deepspeed.config import section

# -- Every key that DeepSpeed reads from its configuration, asked of the release that is installed --
# Most sections are read with models of pydantic, whose fields are the keys. For the others DeepSpeed is let
# read a configuration that says nothing, and that notes the keys for which it is asked.

#: Names of keys; ``None`` is the content of one that holds a value, or a section in which users choose the names.
Keys = Mapping[str, Any]

# The sections that no model reads, with what DeepSpeed must find before it reads on.
_SECTIONS: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "activation_checkpointing": {},
    "aio": {},
    "autotuning": {"model_info": {}},
    "checkpoint": {"parallel_write": {}, "writer": {}},
    "data_efficiency": {"data_routing": {}, "data_sampling": {"dynamic_batching": {}}},
    "data_types": {},
    "expert_parallel": {"enabled": False},
    "flops_profiler": {},
    "optimizer": {"type": "Adam"},
    "scheduler": {"type": "WarmupLR"},
    "timers": {},
    "torch_autocast": {},
}
# Keys that DeepSpeed reads together with certain others only, or not with the rest; the last one up to 0.19.6.
_BESIDE_OTHERS = ("allgather_size", "data_parallel_size", "sequence_parallel_size", "quantize_training")
_OF_DYNAMIC_BATCHING = ("max_tokens", "metrics_path")


class _Asked(dict[str, Any]):
    """A section that notes for which keys it is asked."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(
            {key: _Asked(value) if isinstance(value, Mapping) else value for key, value in content.items()}
        )
        self.known: dict[str, Any] = {}

    def _note(self, key: Any) -> None:
        inner = super().get(key)
        self.known[key] = inner.known if isinstance(inner, _Asked) else None

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._note(key)
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # whether a key is among them is a question for this section


@cache
def known_keys() -> Keys:
    """Return every key of a configuration, a section as a mapping of its keys."""
    asked = _Asked(_SECTIONS)
    let_read(asked)
    known = asked.known | dict.fromkeys(_BESIDE_OTHERS)
    # Removed keys are asked for too, to be refused.
    known = {key: inner for key, inner in known.items() if key not in removed_keys()}
    known["data_efficiency"]["data_sampling"]["dynamic_batching"].update(dict.fromkeys(_OF_DYNAMIC_BATCHING))
    for path, model in config_models().items():
        outer, _, name = path.rpartition(".")
        (known[outer] if outer else known)[name] = _keys_of(model)
    return known


def _keys_of(model: Any) -> Keys:
    known: dict[str, Any] = {}
    for field, info in model.model_fields.items():
        kinds = (info.annotation, *get_args(info.annotation))  # that of an optional section is one of two
        inner = next((_keys_of(kind) for kind in kinds if hasattr(kind, "model_fields")), None)
        known |= {name: inner for name in (field, info.alias) if name is not None}
    return known


# -- A key that DeepSpeed does not know is an error, with the nearest right ones --
# DeepSpeed itself ignores such a key in most sections, and refuses it on every rank in the others.

# Types of optimizers of DeepSpeed's own as they are usually written; it takes them in any spelling. Releases before
# 0.19.7 have more, such as OneBitAdam, whose parameters are not looked at.
_OPTIMIZERS = ("Adagrad", "Adam", "AdamW", "Lamb", "Lion", "MuAdam", "MuAdamW", "Muon", "MuSGD")
# Parameters that its engine takes out before it makes the optimizer, and those that the engine gives or refuses.
_OF_ENGINE = {"adam_w_mode", "fp32_optimizer_states", "torch_adam"}
_NOT_OURS = {"params", "model_params", "optimizer", "adamw_mode", "decoupled_weight_decay", "max_grad_norm"}
# Those of Muon, from which the engine makes two groups, each with its parameters.
_OF_MUON = {"adam_lr", "betas", "eps", "foreach", "lr", "momentum", "muon_lr", "ns_method", "per_head_muon"}


def check_keys(config: Mapping[str, Any], faults: Faults) -> None:
    """Add an error for each key that DeepSpeed does not know, at every level, with the nearest right ones."""
    # Keys that begin with an underscore are comments. Parameters of optimizers and schedulers that are not
    # DeepSpeed's own, and the other places where names are chosen freely, are not looked at.
    _check_section(config, known_keys(), "", faults)
    _check_one_spelling(config, faults)
    _check_optimizer(config, faults)
    _check_scheduler(config, faults)


def is_comment(key: object) -> bool:
    """Return whether a key is there for readers only: it begins with an underscore."""
    return isinstance(key, str) and key.startswith("_")


def _check_section(given: Mapping[str, Any], known: Keys, path: str, faults: Faults) -> None:
    removed = removed_keys()
    for key, value in given.items():
        here = f"{path}{key}"
        if here in removed:
            faults.add(f"{here}: DeepSpeed has removed this key. {removed[here]}")
        elif not isinstance(key, str) or (key not in known and not is_comment(key)):
            where = f" in {path.rstrip('.')}" if path else ""
            faults.add(f"{here}: DeepSpeed has no such key{where}.{_advice(str(key), known, path)}")
        elif known.get(key) is not None:
            if isinstance(value, Mapping):
                _check_section(value, known[key], f"{here}.", faults)
            # Null is no section at all; the former form of ZeRO is on or off.
            elif value is not None and not (here == "zero_optimization" and isinstance(value, bool)):
                some = ", ".join(sorted(known[key])[:3])
                faults.check(False, here, value, f"a section with keys such as {some}")


def _check_one_spelling(config: Mapping[str, Any], faults: Faults) -> None:
    for path, model in config_models().items():
        inner = section(config, path)
        names = [(name, info.alias) for name, info in model.model_fields.items() if info.alias is not None]
        for name, other in names:
            if name in inner and other in inner:
                faults.add(
                    f"{path}.{name}={inner[name]!r} and {path}.{other}={inner[other]!r}: expected one of the two, which"
                    " are the same key."
                )


def _check_optimizer(config: Mapping[str, Any], faults: Faults) -> None:
    name, params = _type_and_params(config, "optimizer")
    if name is None:
        return
    kind = next((own for own in _OPTIMIZERS if own.lower() == name.lower()), None)
    if kind is None:
        if name.lower() not in optimizer_types():
            _check_class("optimizer", name, _OPTIMIZERS, torch.optim, faults)
    elif known := _parameters_of(kind, params.get("torch_adam") is True):
        _check_params("optimizer", name, params, known, faults)


def _parameters_of(kind: str, torch_adam: bool) -> set[str]:
    """Return the parameters of a type of optimizer of DeepSpeed's own; nothing for those of the package mup."""
    if kind == "Muon":
        return _OF_ENGINE | _OF_MUON | {"weight_decay"}
    if kind in ("Adam", "AdamW"):
        made_by = [torch.optim.Adam, torch.optim.AdamW] if torch_adam else optimizers_of(kind)
        return _OF_ENGINE.union(*map(_parameters, made_by))
    more = [torch.optim.Adagrad] if kind == "Adagrad" else []
    return set().union(*map(_parameters, [*optimizers_of(kind), *more]))


def _check_scheduler(config: Mapping[str, Any], faults: Faults) -> None:
    name, params = _type_and_params(config, "scheduler")
    if name is None:
        return
    own = schedulers()
    if name in own:
        _check_params("scheduler", name, params, _parameters(own[name]), faults)
    else:
        _check_class("scheduler", name, own, torch.optim.lr_scheduler, faults)


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters) - _NOT_OURS


def _type_and_params(config: Mapping[str, Any], of: str) -> tuple[str | None, Mapping[str, Any]]:
    kind = section(config, of).get("type")
    return kind if isinstance(kind, str) else None, section(config, of, "params")


def _check_class(of: str, name: str, own: Collection[str], others: ModuleType, faults: Faults) -> None:
    # DeepSpeed looks every name that is not its own up there.
    if not hasattr(others, name):
        near = did_you_mean(name, [*own, *others.__all__])
        expected = f"one of {', '.join(own)}, or a class of {others.__name__}"
        faults.add(f"{of}.type={name!r}: expected {expected}.{near}")


def _check_params(of: str, name: str, params: Mapping[str, Any], known: set[str], faults: Faults) -> None:
    for key in params:
        path = f"{of}.params.{key}"
        if key == "max_grad_norm" and of == "optimizer":
            faults.add(
                f"{path}={params[key]!r}: DeepSpeed does not clip gradients in the optimizer. Write"
                " gradient_clipping at the top of the config, or give the Trainer gradient_clip_val."
            )
        elif key not in known and not is_comment(key):
            advice = did_you_mean(str(key), known) or f" It takes {', '.join(sorted(known))}."
            faults.add(f"{path}: DeepSpeed's {name} has no such parameter.{advice}")


def _advice(key: str, known: Keys, path: str) -> str:
    """Return the nearest keys: of this section, else of all others, as a key is often put one level too high."""
    near = did_you_mean(key, known)
    if near:
        return near
    elsewhere = [place for place in _paths(known_keys()) if place.rpartition(".")[2] == key]
    if elsewhere:
        return f" Did you mean {' or '.join(map(repr, elsewhere[:2]))}?"
    return f" It takes {', '.join(sorted(known))}." if path else ""


def _paths(known: Keys, path: str = "") -> Iterator[str]:
    for key, inner in known.items():
        yield f"{path}{key}"
        if inner is not None:
            yield from _paths(inner, f"{path}{key}.")
