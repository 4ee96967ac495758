"""Print every private name of other packages that this one uses, with its reason."""

from __future__ import annotations

import importlib
import sys

from lightning_lockstep._lightning import __main__ as lightning

# Module of a door, its name there and the title of its list.
_DOORS = (
    ("torch_internals", "TORCH", "Private names of torch"),
    ("torch_internals", "TORCH_IF_THERE", "Private names of torch that some builds or releases lack"),
    ("deepspeed_internals", "DEEPSPEED", "Private names of DeepSpeed"),
    ("hydra_internals", "HYDRA", "Private names of Hydra and OmegaConf"),
)


def main() -> None:
    """Print the lists of Lightning's names, and one of each other door."""
    lightning.main()
    for module, name, title in _DOORS:
        try:
            door = getattr(importlib.import_module(f"lightning_lockstep._doors.{module}"), name)
        except ImportError:  # the package, or what it needs, is not installed
            continue
        lines = [f"    {path}: {why}" for path, why in sorted(door.names.items())]
        sys.stdout.write("\n".join([f"{title}: {len(lines)}", *lines, ""]))


if __name__ == "__main__":
    main()
