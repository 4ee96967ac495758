"""Every activation of every step, on devices whose operations run later: a flag per output, part of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep.numerics.first_bad import bad_flag
from lightning_lockstep.numerics.module_values import NamePatterns, output_values
from lightning_lockstep.overflow.detection.module_hooks import ModuleHooks

__all__ = ["LateActivationWatch"]


class LateActivationWatch(ModuleHooks):
    """Forward hooks that add a flag per output to the step; nothing is read."""

    def __init__(
        self, root: nn.Module, *, allow_inf: NamePatterns, modules: NamePatterns | None = None
    ) -> None:
        self.names: list[str] = []
        self.flags: list[Tensor] = []
        self._allow_inf = allow_inf
        super().__init__(root, modules)

    def begin_step(self) -> None:
        self.names, self.flags = [], []
        super().begin_step()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not self.active:
                return
            for label, value in output_values(output):
                if isinstance(value, Tensor) and value.is_floating_point():
                    whole = f"{name}.{label}"
                    self.names.append(whole)
                    self.flags.append(bad_flag(value, allow_inf=self._allow_inf.match(whole)))

        return hook

    def nan_where_bad(self) -> Tensor | None:
        """Return zero, or nan when something bad was found in this step, on the device; ``None`` without outputs."""
        if not self.flags:
            return None
        any_bad = torch.stack(self.flags).any().float()
        return 0 * torch.log1p(-any_bad)
