"""The bytes of the Python standard library's own sources: text that every interpreter brings along."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_lockstep._settings import Faults
from lightning_lockstep.demo.data_module import BYTE_WINDOWS, GlobalBatchDataModule
from lightning_lockstep.errors import ConfigurationError

# Not the standard library's own work, or thousands of near copies of one another.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idlelib", "turtledemo"}
)


class SourceTextData(GlobalBatchDataModule):
    """Next-byte prediction over the standard library's `.py` files.

    The files are read in the order of their relative paths and cut off at `max_bytes`, so the text is the
    same on every machine with the same Python release.

    Args:
        batch_size: Windows per rank and micro-batch.
        global_batch_size: Windows of all ranks in one optimizer step; when given, `batch_size` is derived.
        context: Bytes the model sees at once.
        max_bytes: Upper limit of the text read [bytes].
        held_out: Share of the text kept for validation, and as much again for the test (0 to 0.5).
        root: Folder to read instead of the standard library's.
        num_workers: Loader processes per rank.
        seed: Seed of the order of the training windows.

    Raises:
        ConfigurationError: A setting is out of range; all faults are listed.

    Ranks:
        Every rank reads the whole text (`max_bytes`) and takes its share of each global batch.
    """

    yields = BYTE_WINDOWS

    def __init__(
        self,
        *,
        batch_size: int = 16,
        global_batch_size: int | None = None,
        context: int = 128,
        max_bytes: int = 2_000_000,
        held_out: float = 0.05,
        root: str | None = None,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        faults = Faults()
        faults.whole("context", context, least=2, what="bytes, a whole number")
        faults.number("held_out", held_out, what="a share of the text", above=0, below=0.5)
        faults.whole("max_bytes", max_bytes, what="bytes, a whole number")
        super().__init__(
            faults,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.context = context
        self.max_bytes = max_bytes
        self.held_out = held_out
        self.root = Path(root) if root is not None else Path(sysconfig.get_paths()["stdlib"])

    def setup(self, stage: str | None = None) -> None:
        """Read the text and cut it into `"train"`, `"val"` and `"test"`, in this order."""
        if self._splits:
            return
        text = torch.frombuffer(bytearray(read_sources(self.root, self.max_bytes)), dtype=torch.uint8)
        held_out = int(len(text) * self.held_out)
        if held_out <= self.context:
            raise ConfigurationError(
                f"{len(text)} bytes of Python sources under {self.root} leave {held_out} for validation,"
                f" less than one window of context={self.context} bytes; raise max_bytes or held_out, or"
                " lower context"
            )
        train, val, test = torch.split(text, [len(text) - 2 * held_out, held_out, held_out])
        self._splits = {
            "train": ByteWindows(train, self.context),
            "val": ByteWindows(val, self.context),
            "test": ByteWindows(test, self.context),
        }


class ByteWindows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text that touch each other: inputs and, one byte on, targets."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text = text  # `(length,)` uint8
        self.context = context

    def __len__(self) -> int:
        """Number of whole windows."""
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one window, each `(context,)` int64."""
        start = index * self.context
        window = self.text[start : start + self.context + 1].to(torch.int64)
        return window[:-1], window[1:]


def read_sources(root: Path, max_bytes: int) -> bytes:
    """Join the `.py` files under `root` in the order of their relative paths, up to `max_bytes`."""
    files = [path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)]
    parts: list[bytes] = []
    length = 0
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        if length >= max_bytes:
            break
        parts.append(path.read_bytes()[: max_bytes - length])
        length += len(parts[-1])
    if not length:
        raise ConfigurationError(
            f"no Python source file under {root}; give another folder with data.root=..."
        )
    return b"".join(parts)
