"""A batch that does not fit in mid-run: its step is split, and acts on weights, logs and hooks as a whole one."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from lightning_lockstep import AutoBatchSize, BatchSizeError, LockstepDDPStrategy
from tests.harness import run_ranks
from tests.models.batch_size.models import FULL, Mid, Walled, _FailsInBackward, of_two


def fit_mid(
    folder: str,
    *,
    strategy: Any = None,
    accumulate: int = 1,
    **kw: Any,
) -> tuple[Tensor, list[float], int, float]:
    """Return weights, losses, how many batches were split, and the loss of the epoch."""
    pl.seed_everything(3, verbose=False)
    module, callback = Mid(**kw), AutoBatchSize("off", on_oom="split")
    run = of_two(
        folder,
        callback,
        strategy=strategy,
        max_steps=-1,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    run.fit(module)
    weights = torch.cat([t.detach().flatten().float() for t in module.state_dict().values()])
    return weights, module.losses, callback.batches_split, float(run.callback_metrics["loss_epoch"])


#: By name: where memory runs out, micro-batches of a step, options of the strategy.
SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "forward of one": ("forward", 1, {}),
    "backward of one": ("backward", 1, {}),
    "forward of two, small buckets": (
        "forward",
        2,
        {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.003},
    ),
    "backward of two, small buckets": (
        "backward",
        2,
        {"gradient_as_bucket_view": False, "bucket_cap_mb": 0.003},
    ),
}


def recoveries(folder: str) -> dict[str, Any]:
    """What becomes of batches that do not fit on the last rank."""
    told: dict[str, Any] = {}
    room = {n: fit_mid(folder, fits=10**9, accumulate=n) for n in (1, 2)}
    for name, (where, accumulate, options) in SPLITS.items():
        weights, losses, count, epoch_loss = fit_mid(
            folder,
            fits=4,
            where=where,
            only=(0, 3, 7),
            on_rank=1,
            strategy=LockstepDDPStrategy(**options),
            accumulate=accumulate,
        )
        right = room[accumulate]
        apart = [abs(a - b) for a, b in zip(losses, right[1], strict=True)]
        told[name] = count, max(*apart, float((weights - right[0]).abs().max()), abs(epoch_loss - right[3]))
    told["norm"] = fit_mid(folder, fits=4, where="backward", only=(3,), on_rank=1, use_norm=True)[2]
    with pytest.raises(BatchSizeError, match="uneven_inputs='join'"):
        fit_mid(folder, fits=4, strategy=LockstepDDPStrategy(uneven_inputs="join"))
    return told


class Logs(Walled):
    """Logs in every way; two batches run out of memory on one rank before that, in the midst of it or after."""

    def __init__(self, where: str) -> None:
        super().__init__(where=where, batch_size=8, rows=64)
        self.norm = self.middle = nn.Identity()
        self.mean, self.sum = MeanMetric(), SumMetric()
        self.several = MetricCollection([MeanAbsoluteError(), MeanSquaredError()])

    def full_here(self, inputs: torch.Tensor, where: str) -> bool:
        here = self.trainer.global_rank == self.trainer.world_size - 1
        return here and self.where == where and len(inputs) > 4 and self.trainer.fit_loop.batch_idx in (1, 3)

    def run_out(self, inputs: torch.Tensor, where: str) -> None:
        if self.full_here(inputs, where):
            raise RuntimeError(FULL)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch
        self.run_out(inputs, "before")
        outputs, targets = self.last(torch.relu(self.first(inputs)))[:, 0], inputs.sum(1)
        loss = (outputs - targets).square().mean()
        both, size = {"on_step": True, "on_epoch": True}, len(inputs)
        self.log("plain", loss)
        self.log("positional", loss, True, False, True, True)
        self.log("none", loss, batch_size=None, **both)
        self.log("number", loss, batch_size=size, **both)
        self.log("always", loss, batch_size=8, **both)
        self.log("synced", loss, sync_dist=True, **both)
        self.log("graph", loss, enable_graph=True, **both)
        self.log("count", (outputs > 0).sum(), reduce_fx="sum", **both)
        self.mean(outputs.detach())
        self.log("mean", self.mean, **both)
        self.run_out(inputs, "midst")
        self.log("largest", outputs.max(), reduce_fx=torch.max, **both)
        self.log("smallest", outputs.min(), reduce_fx="min", sync_dist=True, **both)
        self.log("index", loss, add_dataloader_idx=False, prog_bar=True, **both)
        if self.trainer.is_global_zero:
            self.log("zero", loss, rank_zero_only=True, **both)
        self.log_dict({"a": loss, "b": 2.0})
        self.log_dict({"c": loss}, sync_dist=True, **both)
        self.sum.update(outputs.detach())
        self.log("sum", self.sum, on_step=False, on_epoch=True)
        now = self.several(outputs.detach(), targets)
        self.log_dict({f"now_{name}": value for name, value in now.items()})
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return _FailsInBackward.apply(loss, self.full_here(inputs, "after"))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> Any:
        self.steps: list[dict[str, float]] = []
        return torch.optim.SGD(self.parameters(), lr=0.01)


def logged(folder: str) -> dict[str, Any]:
    told = {}
    for where in ("", "before", "midst", "after"):
        pl.seed_everything(3, verbose=False)
        module, callback = Logs(where), AutoBatchSize("off", on_oom="split")
        run = of_two(folder, callback, max_steps=-1, max_epochs=1)
        run.fit(module)
        told[where] = [*module.steps, {name: float(value) for name, value in run.callback_metrics.items()}]
        told[f"{where}, split"] = callback.batches_split
    return told


class WithGradientHooks(pl.LightningModule):
    """Hooks on parameters that are no linear functions, and one on the module that changes gradients.

    Memory runs out in ``where`` above ``most`` samples.
    """

    def __init__(self, most: int, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.most, self.where, self.samples = most, where, 0
        self.calls, self.hooked = list[str](), [0, 0]

    def called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where and self.samples > self.most:
            raise RuntimeError(FULL)

    def configure_optimizers(self) -> Any:
        self.first.weight.register_hook(self.clamped)
        self.last.weight.register_post_accumulate_grad_hook(self.signed)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def clamped(self, grad: Tensor) -> Tensor:
        self.hooked[0] += 1
        return grad.clamp(-0.01, 0.01) + 0.001

    def signed(self, parameter: Tensor) -> None:
        self.hooked[1] += 1
        parameter.grad = 0.1 * parameter.grad.sign()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples = len(batch[0])
        self.called("training_step")
        runs_out = self.where == "halfway" and self.samples > self.most
        hidden = _FailsInBackward.apply(torch.relu(self.first(batch[0])), runs_out)
        return (self.last(hidden) - 1).pow(2).mean()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.called("backward")
        super().backward(loss, *args, **kwargs)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.called("on_before_zero_grad")

    def on_after_backward(self) -> None:
        self.called("on_after_backward")
        self.last.bias.grad = self.last.bias.grad**2

    def train_dataloader(self) -> DataLoader[Any]:
        data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(data), batch_size=16)


def hooked(folder: str) -> dict[str, Any]:
    answers = {}
    for where in ("", "training_step", "halfway", "backward"):
        module, callback = WithGradientHooks(8, where), AutoBatchSize("off", on_oom="split")
        of_two(folder, callback, max_steps=3).fit(module)
        counts = {name: module.calls.count(name) for name in set(module.calls)}
        answers[where] = [p.detach().clone() for p in module.parameters()], counts, tuple(module.hooked)
    return answers


def cases(folder: str) -> dict[str, Any]:
    """Fits one after the other, on the same ranks."""
    warnings.simplefilter("ignore")
    return {
        **recoveries(folder),
        "logged": logged(folder),
        "hooked": hooked(folder),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, cases, str(tmp_path_factory.mktemp("split")), backend=None, timeout=170)


@pytest.mark.parametrize("name", SPLITS)
def test_the_result_is_that_of_the_whole_batch(found: list[dict[str, Any]], name: str) -> None:
    for count, apart in [told[name] for told in found]:
        assert count >= 3 and apart < 1e-5


def test_a_network_with_batch_norm_is_split_too(found: list[dict[str, Any]]) -> None:
    assert [told["norm"] for told in found] == [1] * len(found)


@pytest.mark.parametrize("where", ["before", "midst", "after"])
def test_every_argument_of_log_is_kept(found: list[dict[str, Any]], where: str) -> None:
    for told in [each["logged"] for each in found]:
        assert len(told[""]) > 3 and len(told[""][-1]) >= 30
        assert told[f"{where}, split"] >= 2
        for batch, (given, right) in enumerate(zip(told[where], told[""], strict=True)):
            assert given.keys() == right.keys(), batch
            for name, value in right.items():
                assert given[name] == pytest.approx(value, rel=1e-4), (batch, name)


@pytest.mark.parametrize("where", ["training_step", "halfway", "backward"])
def test_hooks_act_on_the_gradient_of_the_whole_batch_once(found: list[dict[str, Any]], where: str) -> None:
    for told in [each["hooked"] for each in found]:
        (expected, _, hooked), (weights, counts, times) = told[""], told[where]
        assert hooked == times == (3, 3)
        for given, right in zip(weights, expected, strict=True):
            torch.testing.assert_close(given, right)
        assert counts["on_before_zero_grad"] == counts["on_after_backward"] == 3
        assert counts["backward"] >= 3
