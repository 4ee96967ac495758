"""What both strategies for XLA devices do around steps: tied parameters, random numbers, gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sites.xla.digits import Classifier, fitted, loaders, spmd, trainer


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


class Drops(Classifier):
    """Draws random numbers on the device in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, torch.nn.Dropout(0.5))


def test_the_same_seed_gives_the_same_random_numbers_and_another_seed_others(tmp_path: Path) -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(1)
        module = Drops()
        torch.manual_seed(seed)
        trainer(tmp_path, spmd(), max_epochs=1).fit(module, *loaders())
        return [float(loss) for loss in module.losses]

    first = losses(5)
    assert losses(5) == first
    assert losses(6) != first


class Shifted(Classifier):
    """The gradient of its shift is one number, seen as many."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(30))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) + self.shift.sum()


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_that_are_views_are_clipped(tmp_path: Path, algorithm: str) -> None:
    options: dict[str, Any] = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    alone, moved = pair(tmp_path, Shifted, **options)
    assert moved.losses == pytest.approx(alone.losses, abs=1e-5)


class Manual(Shifted):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        return loss


def test_a_module_that_steps_itself(tmp_path: Path) -> None:
    alone, moved = pair(tmp_path, Manual)
    assert moved.losses == pytest.approx(alone.losses, abs=1e-5)


def test_a_backward_before_torch_xla_has_its_devices_is_explained(tmp_path: Path) -> None:
    program = (
        "import torch; torch.ones(1, requires_grad=True).sum().backward()\n"
        "from pathlib import Path; from tests.sites.xla.digits import fitted, spmd\n"
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
    assert (
        "ConfigurationError: A backward ran in this process before torch-xla had its devices" in done.stderr
    )
