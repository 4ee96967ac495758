"""Print the attributes of Lightning's objects in a small run, as JSON: class name -> attribute names.

python lightning_probe.py FAMILY
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import warnings
from typing import Any

FAMILY = sys.argv[1] if len(sys.argv) > 1 else "lightning.pytorch"
pl = importlib.import_module(FAMILY)

import torch  # noqa: E402

from lightning_lockstep._doors import lightning_internals  # noqa: E402

CLASSES = {
    getattr(importlib.import_module(f"{FAMILY}.{module}" if module else FAMILY), name): name
    for name, module in lightning_internals.OWNERS.items()
}
seen: dict[str, set[str]] = {name: set(dir(cls)) for cls, name in CLASSES.items()}


def look(start: Any) -> None:
    """Note the attributes of ``start`` and of every object of Lightning that it leads to."""
    waiting, done = [start], set()
    while waiting:
        value = waiting.pop()
        if id(value) in done:
            continue
        done.add(id(value))
        if isinstance(value, (list, tuple)):
            waiting += value
            continue
        if isinstance(value, dict):
            waiting += value.values()
        if not any(base.__module__.startswith(FAMILY) for base in type(value).__mro__):
            continue
        attributes = getattr(value, "__dict__", {})
        for cls in type(value).__mro__:
            if cls in CLASSES:
                seen[CLASSES[cls]] |= set(attributes)
        waiting += attributes.values()


class Net(pl.LightningModule):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        look(self.trainer)
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        look([optimizer, optimizer_closure])
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        look(self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_start(self) -> None:
        self.toggle_optimizer(self.optimizers())
        look(self)
        self.untoggle_optimizer(self.optimizers())


class Look(pl.Callback):  # type: ignore[name-defined,misc]
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        look(trainer)

    def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
        look(trainer)


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        look(pl.callbacks.BatchSizeFinder())
        callbacks = [Look(), pl.callbacks.EarlyStopping("loss", check_on_train_epoch_end=True)]
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, fast_dev_run=2, callbacks=callbacks,
            default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
        look(trainer)
        # A client of a server connects to nobody before it is asked.
        look([pl.loggers.WandbLogger(folder), pl.loggers.MLFlowLogger(tracking_uri="http://127.0.0.1:9")])
        for method in ("spawn", "popen"):
            strategy = pl.strategies.DDPStrategy(start_method=method)
            look(pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False))
    print(json.dumps({name: sorted(attributes) for name, attributes in seen.items()}))


if __name__ == "__main__":
    main()
