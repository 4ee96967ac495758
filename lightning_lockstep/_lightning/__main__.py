"""Print every private name of Lightning that this package uses, with its reason."""

from __future__ import annotations

import sys

from lightning_lockstep._lightning import _PRIVATE
from lightning_lockstep._lightning.internals import INHERITED, TOUCHED


def main() -> None:
    """Print three lists: classes and functions, what our subclasses use, what is touched on objects."""
    lists = {
        "Private classes and functions": dict(_PRIVATE.values()),
        "Private names of a Lightning class that subclasses of ours override or use": INHERITED,
        "Private names of Lightning's objects": TOUCHED,
    }
    for title, reasons in lists.items():
        lines = [f"    {name}: {why}" for name, why in sorted(reasons.items())]
        sys.stdout.write("\n".join([f"{title}: {len(reasons)}", *lines, ""]))


if __name__ == "__main__":
    main()
