"""Whether DeepSpeed can be imported, and which of its operations are installed."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Print its version, its accelerator, and the operations that are built or have a builder."""
    from lightning_lockstep._doors.deepspeed_internals import is_installed, make_op_builder, op_name
    from lightning_lockstep.deepspeed.build_tools import OPS
    from lightning_lockstep.deepspeed.importing import import_deepspeed
    from lightning_lockstep.errors import LockstepError

    try:
        deepspeed = import_deepspeed(None)
    except LockstepError as error:
        sys.exit(f"{error}")
    from deepspeed.accelerator import get_accelerator

    builders = {name: make_op_builder(builder) for name, builder in OPS.items()}
    # Where an accelerator lacks an operation, that of the CPU gives a builder of nothing.
    known = [name for name, builder in builders.items() if builder is not None and op_name(builder) == name]
    facts = {
        "version": deepspeed.__version__,
        "accelerator": get_accelerator().device_name(),
        "operations": known,
        "built": [name for name in known if is_installed(name)],
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
