"""The source text of Python's standard library, and a small causal transformer."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_lockstep._settings import Faults
from lightning_lockstep.demo.data import ClassifierModule, GlobalBatchDataModule
from lightning_lockstep.errors import ConfigurationError

# -- The bytes of the Python standard library's own sources: text that every interpreter brings along --

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

    Raises:
        ConfigurationError: A setting is out of range; the message lists every error.

    Ranks:
        Every rank reads the whole text (`max_bytes`) and takes its share of each global batch.
    """

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
    ) -> None:
        faults = Faults()
        faults.whole("context", context, least=2, what="bytes, a whole number")
        faults.number("held_out", held_out, what="a share of the text", above=0, below=0.5)
        faults.whole("max_bytes", max_bytes, what="bytes, a whole number")
        super().__init__(faults, batch_size=batch_size, global_batch_size=global_batch_size, num_workers=num_workers)
        self.context = context
        self.max_bytes = max_bytes
        self.held_out = held_out
        self.root = Path(root) if root is not None else Path(sysconfig.get_paths()["stdlib"])

    def setup(self, stage: str | None = None) -> None:
        """Read the text and cut it into `"train"`, `"val"` and `"test"`, in this order."""
        if self._splits:
            return
        text = torch.frombuffer(read_sources(self.root, self.max_bytes), dtype=torch.uint8)
        held_out = int(len(text) * self.held_out)
        sizes = [len(text) - 2 * held_out, held_out, held_out]
        if min(sizes) <= self.context:
            raise ConfigurationError(
                f"{len(text)} bytes of Python sources under {self.root} leave {min(sizes)} for training or validation,"
                f" less than one window of context={self.context} bytes; raise max_bytes, change held_out, or lower"
                " context"
            )
        parts = torch.split(text, sizes)
        windows = [part.unfold(0, self.context + 1, self.context).to(torch.int64) for part in parts]
        self._splits = {
            name: TensorDataset(one[:, :-1], one[:, 1:])  # inputs and, one byte on, targets
            for name, one in zip(("train", "val", "test"), windows, strict=True)
        }


def read_sources(root: Path, max_bytes: int) -> bytearray:
    """Join the `.py` files under `root` in the order of their relative paths, up to `max_bytes`."""
    files = [path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts)]
    text = bytearray()
    for path in sorted(files, key=lambda path: path.relative_to(root).as_posix()):
        if len(text) >= max_bytes:
            break
        text += path.read_bytes()[: max_bytes - len(text)]
    if not text:
        raise ConfigurationError(f"no Python source file under {root}; give another folder with data.root=...")
    return text


# -- A small causal transformer over bytes --

_BYTES = 256


class ByteGPT(ClassifierModule):
    """Pre-norm transformer decoder that predicts the next byte.

    Args:
        context: Longest window the model can see [bytes].
        layers: Number of blocks.
        width: Size of the hidden state; a multiple of `heads`.
        heads: Attention heads.
        learning_rate: Step size of AdamW.
        weight_decay: Decoupled weight decay of AdamW, on matrices only.
        warmup_steps: Steps over which the learning rate rises from 0 [optimizer steps].

    Raises:
        ConfigurationError: A setting is out of range; the message lists every error.

    Ranks:
        See `ClassifierModule`.
    """

    def __init__(
        self,
        *,
        context: int = 128,
        layers: int = 2,
        width: int = 96,
        heads: int = 4,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 10,
    ) -> None:
        faults = Faults()
        sizes = {"context": context, "layers": layers, "width": width, "heads": heads}
        for name, value in sizes.items():
            faults.whole(name, value)
        if not faults.texts:
            faults.check(width % heads == 0, "width", width, f"a multiple of heads={heads}")
        super().__init__(faults, learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=warmup_steps)
        self.save_hyperparameters()
        self.bytes = nn.Embedding(_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES)

    def forward(self, window: Tensor) -> Tensor:
        """Logits `(batch, length, 256)` of the byte after each byte of `window`, `(batch, length)` int64."""
        positions = torch.arange(window.shape[1], device=window.device)
        hidden = self.bytes(window) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, width = hidden.shape
        packed = self.query_key_value(self.norm_attention(hidden))
        # (3, batch, heads, length, width / heads)
        query, key, value = packed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        deeper: Tensor = hidden + self.feed_forward(hidden)
        return deeper
