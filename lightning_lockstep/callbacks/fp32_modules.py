"""FP32Modules: runs chosen modules in float32, whatever the precision of the run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_lockstep._lightning import LightningModule, Trainer
from lightning_lockstep._settings import Faults, did_you_mean
from lightning_lockstep.callbacks.ends_with_run import EndsWithRun
from lightning_lockstep.numerics.precision import run_in_fp32, runs_in_fp32, undo_run_in_fp32
from lightning_lockstep.numerics.statistics import NamePatterns, module_names


class FP32Modules(EndsWithRun):
    """Runs chosen modules in float32: autocast off, inputs cast to float32, outputs cast back.

    This is the remedy that :class:`~lightning_lockstep.OverflowDetector` prints. Weights keep their dtype and
    ``state_dict`` its keys. If a chosen module is inside another one, only the outer one is changed.

    Args:
        modules: Names of modules below the LightningModule, or patterns such as ``decoder.*.mlp``.

    Raises:
        ConfigurationError: ``modules`` is not a list of names, or, once the model is there, a name matches no module.

    Ranks: every rank has one; nothing is sent.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        super().__init__()
        faults = Faults("FP32Modules")
        expected = "a list of module names or patterns, such as ['decoder.*.mlp']"
        faults.list_of("modules", modules, lambda name: isinstance(name, str), expected)
        faults.raise_all()
        self.modules = tuple(modules)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Change the modules, unless they are changed already, until the run ends."""
        for module in self.chosen(pl_module):
            if not runs_in_fp32(module):
                self.at_end.callback(undo_run_in_fp32, run_in_fp32(module))

    def chosen(self, pl_module: LightningModule) -> list[nn.Module]:
        """Return the modules to run in float32; of one and another inside it, the outer one. Ranks: any, alone."""
        names = module_names(pl_module)
        faults = Faults("FP32Modules")
        chosen: dict[str, nn.Module] = {}
        for pattern in self.modules:
            patterns = NamePatterns([pattern])
            found = {name: module for module, name in names.items() if name and patterns.match(name)}
            chosen.update(found)
            if not found:
                near = did_you_mean(pattern, filter(None, names.values()), most=3)
                faults.add(
                    f"modules={pattern!r}: expected the name of a module of {type(pl_module).__name__}, or a pattern"
                    f" that matches one.{near}"
                )
        faults.raise_all()
        return [
            module
            for name, module in chosen.items()
            if not any(name != other and name.startswith(f"{other}.") for other in chosen)
        ]

    on_validation_start = on_test_start = on_predict_start = on_fit_start
