"""``detect_overflow``: a tensor checked at a place of the user's own choice inside a forward."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_lockstep.numerics.statistics import TensorStatistics, has_bad_values, tensor_statistics

__all__ = ["detect_overflow", "listeners"]

_log = logging.getLogger(__name__)

#: Called with (name, statistics) by :func:`detect_overflow`; a recorder adds itself while it records.
listeners: list[Callable[[str, TensorStatistics], None]] = []


def detect_overflow(tensor: Tensor, name: str = "tensor") -> bool:
    """Say whether a tensor holds a nan or an infinity, at a place of one's own choice inside a forward.

    A bad tensor is logged as a warning with its figures. While an
    :class:`~lightning_lockstep.OverflowDetector` replays or traces a batch, the spot gets a line in the frames.

    Args:
        tensor: Any tensor, of any dtype, layout or device; anything else counts as good.
        name: What to call it.

    Returns:
        Whether a nan or inf was found. Always ``False`` inside ``torch.compile``.

    Ranks: any rank, alone; nothing is sent. One pass over the tensor; on a GPU it waits for the value.
    """
    if torch.compiler.is_compiling():
        return False
    bad = has_bad_values(tensor)
    if bad or listeners:
        statistics = tensor_statistics(tensor)
        if statistics is not None:
            for listener in listeners:
                listener(name, statistics)
            if bad and not listeners:
                _log.warning("%s: nan or inf found (%s)", name, statistics.remarks())
    return bad
