"""What a config asks for that DeepSpeed cannot do: refused by name, or replaced by what it can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_lockstep.deepspeed.configuration.reading import modern_spelling
from lightning_lockstep.errors import ConfigurationError

__all__ = ["Limit", "refuse_or_adapt"]


@dataclass(frozen=True)
class Limit:
    """A key of a config that asks for what DeepSpeed cannot do on a device."""

    path: str  # of the key, such as fp16.enabled
    given: Any
    why: str  # DeepSpeed cannot do it here, as a clause
    instead: Any  # value that does the same, or nearly; None: there is none
    advice: str  # what a user can write, as sentences
    also: Mapping[str, Any] = field(default_factory=dict)  # other keys that the replacement sets, by path


def refuse_or_adapt(
    config: Mapping[str, Any], limits: list[Limit], adapt: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the config without what cannot be done, and a line of text for each replacement."""
    refused = [limit for limit in limits if not adapt or limit.instead is None]
    if refused:
        raise ConfigurationError([_refusal(limit, adapt) for limit in refused])
    adapted = modern_spelling(config)
    lines = []
    for limit in limits:
        for path, value in _changes(limit).items():
            _set(adapted, path, value)
        lines.append(f"{_written(limit)} instead of {limit.path}={limit.given!r}: {limit.why}.")
    return adapted, lines


def _refusal(limit: Limit, adapt: bool) -> str:
    text = f"{limit.path}={limit.given!r}: {limit.why}. {limit.advice}"
    if not adapt and limit.instead is not None:
        text += f" adapt=True of the strategy writes {_written(limit)}."
    return text


def _changes(limit: Limit) -> dict[str, Any]:
    return {limit.path: limit.instead, **limit.also}


def _written(limit: Limit) -> str:
    return " and ".join(f"{path}={value!r}" for path, value in _changes(limit).items())


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for name in sections:
        inner = config.get(name)
        config[name] = config = inner if isinstance(inner, dict) else {}
    config[key] = value
