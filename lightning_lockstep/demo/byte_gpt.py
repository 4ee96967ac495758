"""A small causal transformer over bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_lockstep._settings import Faults
from lightning_lockstep.demo.classifier import ClassifierModule
from lightning_lockstep.demo.data_module import BYTE_WINDOWS

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
        global_train_loss: Average `train_loss` over all ranks instead of logging rank 0's own.

    Raises:
        ConfigurationError: A setting is out of range; all faults are listed.

    Ranks:
        See `ClassifierModule`.
    """

    takes = BYTE_WINDOWS

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
        global_train_loss: bool = True,
    ) -> None:
        faults = Faults()
        sizes = {"context": context, "layers": layers, "width": width, "heads": heads}
        for name, value in sizes.items():
            faults.whole(name, value)
        if not faults.texts:
            faults.check(width % heads == 0, "width", width, f"a multiple of heads={heads}")
        super().__init__(
            faults,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            global_train_loss=global_train_loss,
        )
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
