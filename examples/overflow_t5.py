"""A tiny T5 whose float16 activations overflow in the fourth batch; the report names the module, rank and sample.

python examples/overflow_t5.py                     # one process
python examples/overflow_t5.py --ranks 2           # two; the overflow is on rank 1 only
python examples/overflow_t5.py --fp32 model.encoder.block.0.layer.1.DenseReluDense   # the remedy that it prints
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

from lightning_lockstep import FP32Modules, OverflowDetectedError, OverflowDetector


class T5Task(LightningModule):
    """Learns to copy. One row of ``wi`` points the way of token 1's embedding, and their product is near 88,000."""

    def __init__(self, scale: float = 11_000.0) -> None:
        super().__init__()
        sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        self.model = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
        direction = torch.nn.functional.normalize(torch.randn(64), dim=0)
        with torch.no_grad():
            self.model.shared.weight[1] = 100.0 * direction
            self.model.encoder.block[0].layer[1].DenseReluDense.wi.weight[0] = scale * direction

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def batches(*, rank: int, bad_rank: int) -> DataLoader[Tensor]:
    """Return six batches of four sequences of eight tokens; the fourth batch of ``bad_rank`` holds token 1."""
    data = torch.randint(2, 64, (24, 8), generator=torch.Generator().manual_seed(rank))
    if rank == bad_rank:
        data[14, 5] = 1
    return DataLoader(data, batch_size=4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--fp32", nargs="*", default=[], help="modules that run in float32")
    given = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", 0))
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=given.ranks,
        strategy="auto" if given.ranks == 1 else "ddp",
        plugins=[MixedPrecision("16-mixed", device="cpu")],  # Lightning would take bfloat16 on the CPU
        max_epochs=1,
        callbacks=[
            OverflowDetector(max_frames_to_save=6),
            *([FP32Modules(given.fp32)] if given.fp32 else []),
        ],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(T5Task(), batches(rank=rank, bad_rank=given.ranks - 1))
        ending = f"All {trainer.global_step} steps passed."
    except OverflowDetectedError as error:
        ending = f"OverflowDetectedError: {error}"
    if trainer.is_global_zero:
        print(f"\n{ending}")


if __name__ == "__main__":
    main()
