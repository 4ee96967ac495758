"""The error of a search that cannot begin."""

from __future__ import annotations

from lightning_lockstep._lightning import MisconfigurationException
from lightning_lockstep.errors import BatchSizeError

__all__ = ["SearchRefusedError"]


class SearchRefusedError(BatchSizeError, MisconfigurationException):
    """A search is not possible on any rank; programs for ``BatchSizeFinder`` catch it as Lightning's."""
