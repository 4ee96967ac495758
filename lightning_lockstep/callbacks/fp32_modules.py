"""FP32Modules: chosen modules compute in float32, whatever the precision of the run."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep.errors import ConfigurationError
from lightning_lockstep.numerics.float32 import run_in_fp32, undo_run_in_fp32
from lightning_lockstep.numerics.module_values import NamePatterns, module_names

__all__ = ["FP32Modules"]


class FP32Modules(Callback):
    """Runs chosen modules in float32: autocast off, inputs cast to float32, outputs cast back.

    The remedy that :class:`~lightning_lockstep.OverflowDetector` prints. Weights keep their dtype and
    ``state_dict`` its keys. Where a module inside another chosen one is named too, the outer one decides.

    Args:
        modules: Names of modules below the LightningModule, or patterns such as ``decoder.*.mlp``.

    Raises:
        ConfigurationError: ``modules`` is not a list of names, or, once the model is there, a name fits nothing.

    Ranks: all ranks alike; nothing is sent.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        super().__init__()
        if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
            raise ConfigurationError(
                f"FP32Modules: modules is {modules!r}; expected a list of module names or patterns,"
                " such as ['decoder.*.mlp']."
            )
        self.modules = tuple(modules)
        self._changed: list[nn.Module] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the modules."""
        self._apply(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the modules, where no fit has done so."""
        self._apply(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the modules."""
        self._apply(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the modules."""
        self._apply(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Change the modules back."""
        for module in self._changed:
            undo_run_in_fp32(module)
        self._changed.clear()

    def _apply(self, root: LightningModule) -> None:
        if self._changed:
            return
        names = module_names(root)
        faults = []
        chosen: dict[str, nn.Module] = {}
        for pattern in self.modules:
            fits = NamePatterns([pattern])
            found = {name: module for module, name in names.items() if name and fits.fit(name)}
            chosen.update(found)
            if not found:
                near = get_close_matches(pattern, list(names.values()), n=3, cutoff=0.4)
                hint = f" Near it: {', '.join(near)}." if near else ""
                faults.append(f"FP32Modules: no module of {type(root).__name__} fits {pattern!r}.{hint}")
        if faults:
            raise ConfigurationError(faults)
        for name, module in chosen.items():
            if not any(name != other and name.startswith(f"{other}.") for other in chosen):
                self._changed.append(run_in_fp32(module))
