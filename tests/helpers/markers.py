"""One test body for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest


def world_size(*sizes: int) -> Any:
    """Run the test once for each number of ranks; the test takes an argument ``world_size``."""
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"world_size needs one or more sizes of at least 1, got {sizes}")
    return pytest.mark.parametrize("world_size", sizes, ids=lambda size: f"world{size}")
