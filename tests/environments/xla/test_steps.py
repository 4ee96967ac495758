"""What both strategies for XLA devices do around steps: tied parameters, gradients, a backward before them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.environments.xla.digits import Classifier, fitted, spmd


def pair(tmp_path: Path, kind: type[Classifier], **options: Any) -> tuple[Any, Any]:
    """Return the modules of two fits from the same weights: on one CPU device, and on the mesh."""
    modules = []
    for strategy in ("auto", spmd()):
        torch.manual_seed(1)
        modules.append(fitted(tmp_path, strategy, module=kind(), **options)[1])
    return modules[0], modules[1]


class Tied(Classifier):
    """Its second layer has the weight of the first one, and its bias that of a third place."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 12)
        )
        self.net[2].weight = self.net[0].weight
        self.of_optimizer = 0

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.net[2].weight is self.net[0].weight
        self.of_optimizer = len(self.trainer.optimizers[0].param_groups[0]["params"])


def test_tied_parameters_stay_tied(tmp_path: Path) -> None:
    alone, moved = pair(tmp_path, Tied)
    assert moved.losses == pytest.approx(alone.losses, abs=1e-5)
    assert moved.of_optimizer == alone.of_optimizer == 6
    assert moved.net[2].weight is moved.net[0].weight, "after the run too"
    assert moved.net[0].weight.device.type == "cpu"


class Shifted(Classifier):
    """The gradient of its shift is one number, seen as many."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(30))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.shift.sum()


def test_gradients_that_are_views_are_clipped(tmp_path: Path) -> None:
    alone, moved = pair(tmp_path, Shifted, gradient_clip_val=0.1)
    assert moved.losses == pytest.approx(alone.losses, abs=1e-5)


def test_a_backward_before_torch_xla_has_its_devices_is_explained(tmp_path: Path) -> None:
    program = (
        "import torch; torch.ones(1, requires_grad=True).sum().backward()\n"
        "from pathlib import Path; from tests.environments.xla.digits import fitted, spmd\n"
        f"fitted(Path({str(tmp_path)!r}), spmd())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "ConfigurationError: A backward ran in this process before torch-xla had its devices" in done.stderr
