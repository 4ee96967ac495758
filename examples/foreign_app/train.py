"""Somebody's Hydra app: it makes its own Trainer, and imports nothing of lightning-lockstep."""

from __future__ import annotations

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig


@hydra.main("conf", "config", version_base="1.3")
def main(config: DictConfig) -> float:
    """Train as the command line says; print what did it."""
    own = [instantiate(callback) for callback in config.callbacks.values()]
    trainer = instantiate(config.trainer, callbacks=own)
    trainer.fit(instantiate(config.model), instantiate(config.data))
    if trainer.is_global_zero:
        used = [trainer.strategy, trainer.precision_plugin, *trainer.loggers, *own]
        print(f"{trainer.world_size} rank(s):", ", ".join(type(part).__name__ for part in used))
    return float(trainer.callback_metrics["train_loss"])


if __name__ == "__main__":
    main()
