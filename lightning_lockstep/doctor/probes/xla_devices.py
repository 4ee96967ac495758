"""Which devices torch-xla finds."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print their type and number."""
    from lightning_lockstep.xla.runtime import XLARuntime

    runtime = XLARuntime("lockstep-doctor")
    sys.stdout.write(json.dumps({"device_type": runtime.device_type, "devices": runtime.num_devices}) + "\n")


if __name__ == "__main__":
    main()
