"""How ranks are started, and what the process that started them does when one ends.

For a strategy of one's own: :func:`detect_environment`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._exports import lazy

if TYPE_CHECKING:
    from lightning_lockstep.launchers.environments.cluster_environment import (
        detect_environment as detect_environment,
    )
else:
    _NAMES = {"detect_environment": "launchers.environments.cluster_environment"}
    __all__ = sorted(_NAMES)
    __getattr__, __dir__ = lazy(__name__, _NAMES)
