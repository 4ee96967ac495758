"""A tiny T5 whose float16 activations overflow: our report beside that of Transformers' DebugUnderflowOverflow.

python examples/overflow_t5.py                     # one process
python examples/overflow_t5.py --ranks 2           # two; the overflow is on rank 1 only
python examples/overflow_t5.py --beside            # and what Transformers' detector prints for the same batch
python examples/overflow_t5.py --fp32 model.encoder.block.0.layer.1.DenseReluDense   # the remedy
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration
from transformers.debug_utils import DebugUnderflowOverflow

from lightning_lockstep import FP32Modules, OverflowDetectedError, OverflowDetector

VOCABULARY, LENGTH, BAD_BATCH, SCALE = 64, 8, 3, 11_000.0


def tiny_t5(*, scale: float) -> T5ForConditionalGeneration:
    """Return a tiny T5 with random weights whose first feed-forward block answers loudly to token 1.

    One row of ``wi`` points the way of that token's embedding. With ``scale`` 11,000 its product is near 88,000,
    beyond float16's 65,504, and stays below 45,000 for other tokens.
    """
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():
        direction = torch.nn.functional.normalize(torch.randn(64), dim=0)
        model.shared.weight[1] = 100.0 * direction
        model.encoder.block[0].layer[1].DenseReluDense.wi.weight[0] = scale * direction
    return model


class T5Task(LightningModule):
    """Learns to copy."""

    def __init__(self, scale: float = SCALE) -> None:
        super().__init__()
        self.model = tiny_t5(scale=scale)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def batches(*, rank: int, bad_rank: int | None) -> DataLoader[Tensor]:
    """Return six batches of four sequences; the fourth batch of ``bad_rank`` holds token 1."""
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(2, VOCABULARY, (24, LENGTH), generator=generator)
    if bad_rank is None or rank == bad_rank:
        data[4 * BAD_BATCH + 2, 5] = 1
    return DataLoader(data, batch_size=4)


def plugin(precision: str) -> Any:
    """Return the precision plugin; Lightning itself would turn float16 on the CPU into bfloat16."""
    if precision.endswith("-true"):
        return HalfPrecision(precision)
    return MixedPrecision(precision, device="cpu")


def transformers_frames(task: T5Task, batch: Tensor, *, precision: str) -> str:
    """Return what Transformers' detector prints when it sees the same batch with the same weights."""
    detector = DebugUnderflowOverflow(task.model, max_frames_to_save=6)
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        plugin(precision).forward_context(),
        contextlib.suppress(ValueError),
    ):
        task.training_step(batch, 0)
    del detector
    return printed.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--precision", default="16-mixed", choices=["16-mixed", "16-true", "bf16-mixed", "bf16-true"]
    )
    parser.add_argument("--fp32", nargs="*", default=[], help="modules that run in float32")
    parser.add_argument("--action", default="raise", choices=["raise", "warn", "skip"])
    parser.add_argument("--mode", default="replay", choices=["replay", "hooks"])
    parser.add_argument("--report-dir", default=None)
    parser.add_argument("--beside", action="store_true", help="print Transformers' report too")
    given = parser.parse_args()

    warnings.filterwarnings("ignore", module="lightning")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    seed_everything(1, verbose=False)
    task = T5Task()
    callbacks: list[Any] = [
        OverflowDetector(
            action=given.action, mode=given.mode, report_dir=given.report_dir, max_frames_to_save=6
        )
    ]
    if given.fp32:
        callbacks.append(FP32Modules(given.fp32))
    trainer = Trainer(
        accelerator="cpu",
        devices=given.ranks,
        strategy="auto" if given.ranks == 1 else "ddp",
        plugins=[plugin(given.precision)],
        max_epochs=1,
        callbacks=callbacks,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    bad_rank = None if given.ranks == 1 else 1
    loader = batches(rank=rank, bad_rank=bad_rank)
    try:
        trainer.fit(task, loader)
    except OverflowDetectedError as error:
        if rank == 0:
            print(f"\nOverflowDetectedError: {error}")
    else:
        if rank == 0:
            print(f"\nAll {trainer.global_step} steps passed.")
    if given.beside and rank == 0:
        bad = list(batches(rank=bad_rank or 0, bad_rank=bad_rank))[BAD_BATCH]
        print("\nTransformers' DebugUnderflowOverflow on the same batch:")
        print(transformers_frames(task, bad, precision=given.precision))


if __name__ == "__main__":
    main()
