"""How a strategy that runs DeepSpeed writes and loads checkpoints, whole folders and plain files alike."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_lockstep._console import say
from lightning_lockstep._lightning import DDPStrategy, DeepSpeedStrategy, LightningModule, TrainerFn
from lightning_lockstep.deepspeed.checkpoints.files import is_deepspeed_checkpoint
from lightning_lockstep.deepspeed.checkpoints.loading import load_plain_weights, whole_checkpoint
from lightning_lockstep.deepspeed.checkpoints.resuming import resume_redivided, writers_differ
from lightning_lockstep.deepspeed.checkpoints.saving import whole_folder
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.strategies.lifecycle import RankLifecycle

__all__ = ["DeepSpeedCheckpoints"]


class DeepSpeedCheckpoints(DeepSpeedStrategy):
    """Lightning's strategy, with checkpoints that are whole or not there, for any number of ranks."""

    lifecycle: RankLifecycle

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint folder, in place of one of that name once the new one is whole."""
        target = self.broadcast(str(filepath))
        with (
            whole_folder(
                target,
                rank=self.global_rank,
                is_first_of_node=self.local_rank == 0,
                meet=self._meet,
                gather=current_communicator().gather,
            ) as draft,
            warnings.catch_warnings(),
        ):
            # That parts of the weights go to several files, and how to join them: docs/deepspeed.md, shorter.
            warnings.filterwarnings("ignore", message="When saving the DeepSpeed Stage 3 checkpoint")
            super().save_checkpoint(checkpoint, draft, storage_options)

    def _meet(self) -> None:
        self.barrier()
        self.lifecycle.check()  # a barrier does not wait once a rank has failed

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint folder of DeepSpeed, or a plain Lightning checkpoint, which has whole weights."""
        if not is_deepspeed_checkpoint(checkpoint_path):
            return DDPStrategy.load_checkpoint(self, checkpoint_path, weights_only)
        stage, communicator = self._complete_config["zero_optimization"]["stage"], current_communicator()
        if not self._fits:
            # DeepSpeed 0.19 itself cannot do this in stage 3, and only on as many ranks in the others.
            return whole_checkpoint(checkpoint_path, self._module, communicator, divided=stage == 3)
        folder = Path(checkpoint_path)
        if not writers_differ(folder, communicator, stage=stage, half=self._half):
            return super().load_checkpoint(checkpoint_path, weights_only)
        return resume_redivided(
            self.model,
            self._module,
            folder,
            communicator,
            strict=self._module.strict_loading,
            plain_only=bool(weights_only),
        )

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _half(self) -> str | None:
        """The section of the configuration that switches 16 bits on."""
        sections = ((name, self._complete_config.get(name)) for name in ("bf16", "fp16"))
        return next((name for name, inner in sections if (inner or {}).get("enabled")), None)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights into the model if the checkpoint has them; DeepSpeed has loaded its own."""
        if "state_dict" not in checkpoint:
            return
        assert self.lightning_module is not None
        load_plain_weights(self.model, self.lightning_module, checkpoint["state_dict"], strict=strict)
        if self._fits and checkpoint.get("optimizer_states") and self.is_global_zero:
            say(
                "lightning-lockstep: the checkpoint is a plain one: its weights are loaded, and the state of the"
                " optimizer starts fresh. A checkpoint folder of DeepSpeed has both."
            )

    @property
    def _complete_config(self) -> dict[str, Any]:
        assert self.config is not None
        return self.config

    @property
    def _fits(self) -> bool:
        assert self.lightning_module is not None
        return bool(self.lightning_module.trainer.state.fn == TrainerFn.FITTING)
