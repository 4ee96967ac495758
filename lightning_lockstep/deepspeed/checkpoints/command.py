"""The command that writes a checkpoint folder into one file: ``lockstep-consolidate FOLDER [--output FILE]``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from lightning_lockstep._text import say, size_in_words
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate
from lightning_lockstep.deepspeed.checkpoints.file_names import consolidated_name
from lightning_lockstep.deepspeed.checkpoints.files import is_checkpoint_folder
from lightning_lockstep.distributed.checkpoint_folder import saved_at
from lightning_lockstep.errors import ConfigurationError

_PROGRAM = "lockstep-consolidate"
_LAST = Path("checkpoints", "last.ckpt")


def main(argv: Sequence[str] | None = None) -> int:  # exit code; 2: checkpoint or output cannot be used
    """Consolidate a checkpoint as the command line says, and print what was written."""
    arguments = _parser().parse_args(argv)
    try:
        folders = [_checkpoint_of(path) for path in arguments.folders]
        output = arguments.output or consolidated_name(folders[0].absolute())
        if output.exists() and not arguments.force:
            raise ConfigurationError(f"{output}: exists. Add --force to replace it, or name another file.")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            consolidate(folders, output, dtype=arguments.dtype)
    except (ConfigurationError, OSError) as error:  # such as a folder that may not be read
        say(f"{_PROGRAM}: {error}")
        return 2
    for warning in caught:
        say(f"{_PROGRAM}: {warning.message}")
    sys.stdout.write(f"{output}: {size_in_words(output.stat().st_size)}\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Write a checkpoint folder, of DeepSpeed in any stage of ZeRO or of parts by LockstepFSDPStrategy,"
        " into one Lightning checkpoint. It holds the weights and the state of the loop, and from parts also that of"
        " the optimizer. DeepSpeed need not be installed.",
    )
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="the checkpoint folder, or a run folder with checkpoints/last.ckpt; if each node wrote to its own disk,"
        " the folders of all nodes",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "as_saved"),
        default="float32",
        help="float32 (default): half-precision weights as float32, from the optimizer's float32 copies where there"
        " are any; as_saved: in the dtypes of the model",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write; default: next to the first folder, NAME.consolidated.ckpt",
    )
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")
    return parser


def _checkpoint_of(folder: Path) -> Path:
    """Return the checkpoint that a folder is, or the last one of the run that it is."""
    folder, last = saved_at(folder), saved_at(folder / _LAST)
    return last if not is_checkpoint_folder(folder) and is_checkpoint_folder(last) else folder
