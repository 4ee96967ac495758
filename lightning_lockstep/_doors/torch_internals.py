"""What rooms still take from here of torch's private names; it goes with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten as tree_flatten

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SYNC_STATES = "_sync_dist"  # of torchmetrics.Metric
MODULES = "_modules"  # of torch.nn.Module
LOAD_OWN_VALUES = "_load_from_state_dict"  # of torch.nn.Module


def storage_identity(tensor: Tensor) -> int:
    """Return a number that tensors share if they share their storage."""
    return int(tensor.untyped_storage()._cdata)


def versions_of_modules(state: Any) -> Any:
    """Return the versions of the modules in a state dict; ``None`` without."""
    return getattr(state, "_metadata", None)


def set_versions_of_modules(state: Any, versions: Any) -> None:
    """Put versions of modules into a state dict."""
    state._metadata = versions


def forget_iterator(loader: DataLoader[Any]) -> None:
    """Have a loader make its iterator anew."""
    vars(loader)["_iterator"] = None


@contextmanager
def as_worker(info: Any) -> Iterator[None]:
    """Let ``torch.utils.data.get_worker_info`` return ``info``."""
    holder: Any = torch.utils.data._utils.worker
    before, holder._worker_info = holder._worker_info, info
    try:
        yield
    finally:
        holder._worker_info = before
