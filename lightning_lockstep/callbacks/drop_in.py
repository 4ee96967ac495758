"""What callbacks that take the place of Lightning's have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_lockstep._lightning import MisconfigurationException
from lightning_lockstep.errors import ConfigurationError

__all__ = ["DropInConfigurationError", "faults_as_lightnings"]


class DropInConfigurationError(ConfigurationError, MisconfigurationException):
    """Bad arguments, which a program written for Lightning's class catches as ``MisconfigurationException``."""


@contextmanager
def faults_as_lightnings() -> Iterator[None]:
    """Raise a ``ConfigurationError`` of the body as one that Lightning's programs catch as well."""
    try:
        yield
    except ConfigurationError as error:
        raise DropInConfigurationError(error.faults) from None
