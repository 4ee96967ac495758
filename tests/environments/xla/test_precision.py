"""What each precision does to each kind of tensor, on the real runtime: the table of docs/xla.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from tests.environments.xla.digits import Classifier, fitted, spmd

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Notes(Classifier):
    """Notes the dtype of its parameters and of the optimizer's state in the last step, and what is logged."""

    def __init__(self, dtype_of_scale: torch.dtype) -> None:
        super().__init__(dtype_of_scale)
        self.mean = MeanMetric()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.log("mean_loss", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        weight, scale = self.net[0].weight, self.scale
        self.dtypes |= {"float32 parameter": weight.dtype, "float64 parameter": scale.dtype}
        self.dtypes |= {"gradient": weight.grad.dtype if weight.grad is not None else weight.dtype}
        self.dtypes["state"] = optimizer.state[weight]["exp_avg"].dtype
        self.dtypes["metric"] = self.mean.mean_value.dtype  # type: ignore[assignment]
        self.dtypes["state of float64"] = optimizer.state[scale]["exp_avg"].dtype


@pytest.mark.parametrize(
    ("precision", "downcast", "expected"),
    [
        ("32-true", False, {"float32 parameter": F32, "float64 parameter": F64, "hidden": F32, "state": F32}),
        ("64-true", False, {"float32 parameter": F64, "float64 parameter": F64, "hidden": F64, "state": F64}),
        (
            "bf16-mixed",
            False,
            {"float32 parameter": F32, "float64 parameter": F64, "hidden": BF16, "state": F32},
        ),
        (
            "bf16-true",
            False,
            {"float32 parameter": BF16, "float64 parameter": BF16, "hidden": BF16, "state of float64": BF16},
        ),
        (
            "bf16-true",
            True,
            {"float32 parameter": BF16, "float64 parameter": F32, "hidden": BF16, "state of float64": F32},
        ),
    ],
)
def test_the_dtype_of_each_tensor(
    tmp_path: Path, precision: str, downcast: bool, expected: dict[str, torch.dtype]
) -> None:
    module = Notes(torch.float64)
    strategy = spmd(downcast_bf16=downcast)
    made, _ = fitted(tmp_path, strategy, module=module, precision=precision)
    assert {name: module.dtypes[name] for name in expected} == expected
    assert module.dtypes["metric"] is F32
    assert module.dtypes["gradient"] == module.dtypes["float32 parameter"]
    logged = {name: value.dtype for name, value in made.callback_metrics.items()}
    assert all(dtype in (F32, F64) for dtype in logged.values()), logged
    assert module.losses[-1] < module.losses[0]
