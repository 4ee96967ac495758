"""Print every private name of other packages that this one uses, with its reason."""

from __future__ import annotations

import importlib
import sys

from lightning_lockstep._doors.lightning import NAMES, PRIVATE
from lightning_lockstep._doors.lightning_internals import INHERITED, TOUCHED

# Module of a door, its name there and the title of its list.
_DOORS = (
    ("torch_internals", "TORCH", "Private names of torch"),
    ("torch_internals", "TORCH_IF_THERE", "Private names of torch that some builds or releases lack"),
    ("torch_internals", "TORCHMETRICS", "Private names of torchmetrics"),
    ("deepspeed_engines", "DEEPSPEED", "Private or undocumented names of DeepSpeed"),
)


def main() -> None:
    """Print the three lists of Lightning's names, and one of each other door."""
    lists = {
        "Private classes and functions of Lightning": {NAMES[name]: why for name, why in PRIVATE.items()},
        "Private names of a Lightning class that subclasses of ours override or use": INHERITED,
        "Private names of Lightning's objects": TOUCHED,
    }
    for module, name, title in _DOORS:
        try:
            lists[title] = getattr(importlib.import_module(f"lightning_lockstep._doors.{module}"), name).names
        except ImportError:  # noqa: PERF203  # the package, or what it needs, is not installed
            continue
    for title, reasons in lists.items():
        lines = [f"    {name}: {why}" for name, why in sorted(reasons.items())]
        sys.stdout.write("\n".join([f"{title}: {len(reasons)}", *lines, ""]))


if __name__ == "__main__":
    main()
