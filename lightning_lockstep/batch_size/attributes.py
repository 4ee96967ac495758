"""The attributes that hold a batch size, in the places where Lightning looks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_lockstep._lightning import LightningModule, _lightning_get_all_attr_holders

__all__ = ["SizeAttributes"]


class SizeAttributes:
    """The batch size as attribute of the module, its hparams, the data module and its hparams, wherever it exists.

    A property that cannot be set counts as none: it shows what another place holds.
    """

    def __init__(self, module: LightningModule, name: str) -> None:
        self._module, self._name = module, name

    def __bool__(self) -> bool:
        return bool(self._holders())

    def __str__(self) -> str:
        return " and ".join(f"{type(holder).__name__}.{self._name}" for holder in self._holders())

    @property
    def values(self) -> list[Any]:
        """What each place holds, in Lightning's order."""
        return [
            holder[self._name] if isinstance(holder, dict) else getattr(holder, self._name)
            for holder in self._holders()
        ]

    def set(self, size: int) -> None:
        self._write([size] * len(self._holders()))

    @contextmanager
    def former_on_error(self) -> Iterator[None]:
        """Put the former values back if the body raises."""
        before = self.values
        try:
            yield
        except BaseException:
            self._write(before)
            raise

    @contextmanager
    def former_afterwards(self) -> Iterator[None]:
        """Put the former values back when the body ends."""
        before = self.values
        try:
            yield
        finally:
            self._write(before)

    def _holders(self) -> list[Any]:
        # Looked up each time: restoring a module may replace its hparams.
        found = _lightning_get_all_attr_holders(self._module, self._name)
        return [holder for holder in found if not _is_read_only(holder, self._name)]

    def _write(self, values: Sequence[Any]) -> None:
        for holder, value in zip(self._holders(), values, strict=True):
            if isinstance(holder, dict):
                holder[self._name] = value
            else:
                setattr(holder, self._name, value)


def _is_read_only(holder: Any, name: str) -> bool:
    attribute = getattr(type(holder), name, None)
    return isinstance(attribute, property) and attribute.fset is None
