"""Does a value from a config fit the type that a signature asks for?"""

from __future__ import annotations

import enum
import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig

from lightning_lockstep._settings import did_you_mean

_PLAIN: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def mismatch(value: Any, hint: Any, *, default: Any = inspect.Parameter.empty) -> Expected | None:
    """Say what was expected if `value` certainly does not fit the type `hint`.

    Judged are numbers, text, true and false, null and fixed choices, and unions of them; for anything else,
    as for a value that fits, `None` is returned.
    """
    if hint is None or hint is Any or (value is None and default is None):
        return None
    if isinstance(value, (DictConfig, ListConfig)):
        return None
    members = _members(hint)
    words: list[str] = []
    for member in members:
        if member in _PLAIN:
            if _fits(value, member):
                return None
            words.append(_PLAIN[member])
        elif member is type(None):
            if value is None:
                return None
            words.append("null")
        elif typing.get_origin(member) is typing.Literal:
            choices = typing.get_args(member)
            if value in choices:
                return None
            words += [repr(choice) for choice in choices if isinstance(choice, str)] or [
                repr(c) for c in choices
            ]
        elif _is_rich(member) and not isinstance(value, str) and value is not None:
            words.append(_type_name(member))  # a number cannot be one of these
        else:
            return None
    if _PLAIN[float] in words:
        words = [word for word in words if word != _PLAIN[int]]
    return Expected(tuple(dict.fromkeys(words)))


@dataclass(frozen=True)
class Expected:
    """The kinds of value that would fit, in words; fixed choices in quotes."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        *others, last = self.words
        return f"{', '.join(others)} or {last}" if others else last

    def near(self, value: Any) -> str:
        """The fixed choice nearest to `value`, as a question."""
        choices = [word.strip("'") for word in self.words if word.startswith("'")]
        return did_you_mean(value, choices) if isinstance(value, str) else ""


def _members(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [member for argument in typing.get_args(hint) for member in _members(argument)]
    return [hint]


def _fits(value: Any, plain: type) -> bool:
    if plain is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if plain is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, plain)


def _is_rich(member: Any) -> bool:
    """Whether `member` is a class that no plain value is an instance of."""
    origin = typing.get_origin(member) or member
    return (
        isinstance(origin, type)
        and not issubclass(origin, (int, float, str, bool, enum.Enum))
        and origin is not object
    )


def _type_name(member: Any) -> str:
    origin = typing.get_origin(member) or member
    return {list: "a list", dict: "a mapping", tuple: "a list"}.get(
        origin, getattr(origin, "__name__", str(origin))
    )
