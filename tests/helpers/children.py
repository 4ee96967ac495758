"""What every process that a test starts gets in its environment."""

from __future__ import annotations

import os
from pathlib import Path

#: Holds the ``sitecustomize`` by which ranks run as forks and lines stay whole.
CHILD_SITE = Path(__file__).with_name("child_site")


def put_on_path() -> None:
    """Have all Python processes that are started from here find it."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(CHILD_SITE) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHILD_SITE), *path]))
