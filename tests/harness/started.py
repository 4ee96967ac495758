"""What a test starts once and takes down again, also when only a part of it has started."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Started"]


class Started(ABC):
    """A context manager of which :meth:`close` also takes down what :meth:`_start` had started when it failed."""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _start(self) -> None:
        """Start everything."""

    @abstractmethod
    def close(self) -> None:
        """Take down what is there."""
