"""A fit goes on on as many ranks: by the names of its parameters, with its own settings, or it says why it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_lockstep import ConfigurationError
from lightning_lockstep._lightning import Trainer
from tests.harness import run_ranks
from tests.models.deepspeed.other_ranks import (
    CASES,
    GLOBAL_BATCH,
    Net,
    check_refused,
    differences,
    fit,
    loader,
    refusals,
    write,
)
from tests.models.deepspeed.run_config import loader as data
from tests.models.deepspeed.run_config import trainer


class Turned(Net):
    """Its optimizer has the parameters of each group in the opposite order."""

    def configure_optimizers(self) -> Any:
        (optimizer,), (schedule,) = super().configure_optimizers()
        for group in optimizer.param_groups:
            group["params"].reverse()
        return [optimizer], [schedule]


class Moved(Net):
    """Its first layer is made last."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self._modules["first"] = self._modules.pop("first")


# -- by name ---------------------------------------------------------------------------------------------

WRITTEN = ["stage 0", "stage 1", "stage 2", "stage 2, one group", "stage 3", "stage 1, bf16"]
#: What a fit goes on from, in which case, and with which module.
GOES_ON: dict[str, tuple[str, str, type[Net]]] = {
    "turned, stage 2": ("stage 2", "stage 2", Turned),
    "turned, stage 3": ("stage 3", "stage 3", Turned),
    "turned, stage 1 in bf16": ("stage 1, bf16", "stage 1, bf16", Turned),
    "moved, stage 2": ("stage 2", "stage 2", Moved),
    "moved, stage 3": ("stage 3", "stage 3", Moved),
    "round robin added": ("stage 2, one group", "stage 2, round robin", Net),
    "a folder of each node": ("node", "stage 2", Net),
}


def go_on(folder: str) -> dict[str, list[str]]:
    """Return for each fit the names of what it does not begin with as it was saved."""
    found = {}
    for name, (source, case, kind) in GOES_ON.items():
        rank = torch.distributed.get_rank()
        path = f"{folder}/{source}{rank if source == 'node' else ''}.ckpt"
        look, _ = fit(2, case, epochs=2, ckpt_path=path, net=kind(CASES[case][2]), local=source == "node")
        truth = torch.load(f"{folder}/{source.replace('node', 'stage 2')}.truth", weights_only=False)
        found[name] = [key for key, value in differences(look.start, truth).items() if value]
    return found


def write_of_nodes(folder: Path) -> None:
    """Make a folder for each of two nodes, which lacks the file of the other's rank."""
    for rank in (0, 1):
        others = shutil.ignore_patterns(f"*rank_{1 - rank}_mp*")
        shutil.copytree(folder / "stage 2.ckpt", folder / f"node{rank}.ckpt", ignore=others)


class Keeps(Net):
    """Its optimizer does not have its last layer, which is not frozen either."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.first.parameters(), 0.02)


def unsaved(folder: str) -> str:
    runner = trainer({"zero_optimization": {"stage": 3}})
    runner.fit(Keeps("AdamW"), loader(2))
    runner.save_checkpoint(f"{folder}/keeps.ckpt")
    try:
        again = trainer({"zero_optimization": {"stage": 3}}, max_epochs=2)
        again.fit(Keeps("AdamW"), loader(2), ckpt_path=f"{folder}/keeps.ckpt")
    except ConfigurationError as error:
        return str(error)
    return "no error"


# -- by the order of values, which DeepSpeed alone can do --------------------------------------------------


class Blocks(torch.optim.Optimizer):
    """Keeps one number for many weights, as optimizers in 8 bits do."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                block = self.state[parameter].setdefault("block", torch.ones(3))
                block += parameter.grad.norm()
                parameter.data -= group["lr"] * parameter.grad / block[0]
        return loss


class WithBlocks(Net):
    def configure_optimizers(self) -> Any:
        return Blocks(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            {"lr": 0.1, "length": 3},
        )


class WithSGD(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 0.1)


class WithBlocksTurned(Net):
    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return Blocks(trained[::-1], {"lr": 0.1, "length": 3})


def blocks(folder: str) -> tuple[bool, list[str]]:
    """Return whether a fit goes on as a straight one, and what is said of another order and of another optimizer."""

    def end(net: Net, epochs: int, path: str | None = None) -> tuple[Trainer, list[Any]]:
        # So large that nothing is clipped.
        config = {"zero_optimization": {"stage": 2}}
        runner = trainer(config, max_epochs=epochs, gradient_clip_val=epochs * 1e3)
        runner.fit(net, loader(2), ckpt_path=path)
        optimizer: Any = runner.strategy.model.optimizer
        (entry,) = optimizer.optimizer.state.values()
        assert optimizer.clip_grad == epochs * 1e3
        return runner, [optimizer.single_partition_of_fp32_groups[0].clone(), entry["block"].clone()]

    path = f"{folder}/blocks.ckpt"
    _, straight = end(WithBlocks("AdamW"), 2)
    end(WithBlocks("AdamW"), 1)[0].save_checkpoint(path)
    _, resumed = end(WithBlocks("AdamW"), 2, path)

    def refusal(net: Net) -> str:
        try:
            end(net, 2, path)
        except ConfigurationError as error:
            return str(error)
        return "no error"

    said = [refusal(WithBlocksTurned("AdamW")), refusal(WithSGD("AdamW"))]
    return all(map(torch.equal, straight, resumed)), said


# -- which value wins ----------------------------------------------------------------------------------------

#: What the run that saves has, what the one that goes on is given, and which it has then: as docs/deepspeed.md says.
VALUES: dict[str, tuple[float, float, str]] = {
    "lr": (0.02, 0.03, "checkpoint"),
    "beta": (0.8, 0.7, "checkpoint"),
    "weight_decay": (0.1, 0.2, "checkpoint"),
    "gamma": (0.5, 0.25, "checkpoint"),  # of the scheduler
    "gradient_clip_val": (1.0, 0.01, "new run"),
    "accumulate_grad_batches": (1, 2, "new run"),
    "batch_size": (6, 3, "new run"),
    "reduce_bucket_size": (1001, 1002, "new run"),
}


class Settings(Net):
    def __init__(self, given: dict[str, float]) -> None:
        super().__init__("AdamW")
        self.given = given

    def configure_optimizers(self) -> Any:
        lr, beta, decay, gamma = (self.given[name] for name in ("lr", "beta", "weight_decay", "gamma"))
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr, (beta, 0.99), weight_decay=decay)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma)]


def settings_of(runner: Trainer) -> dict[str, Any]:
    engine: Any = runner.strategy.model
    (group,), scaler = engine.optimizer.param_groups, getattr(engine.optimizer, "loss_scaler", None)
    return {
        "lr": group["lr"],
        "beta": group["betas"][0],
        "weight_decay": group["weight_decay"],
        "gamma": runner.lr_scheduler_configs[0].scheduler.gamma,
        "gradient_clip_val": getattr(engine.optimizer, "clip_grad", engine.gradient_clipping()),
        "accumulate_grad_batches": engine.gradient_accumulation_steps(),
        "batch_size": engine.train_micro_batch_size_per_gpu(),
        "reduce_bucket_size": getattr(engine.optimizer, "reduce_bucket_size", None),  # none in stage 0
        "loss scale": tuple(getattr(scaler, name, None) for name in ("min_scale", "scale_window", "cur_scale")),
    }


def fp16(**options: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **options}}


BF16: dict[str, Any] = {"bf16": {"enabled": True}}
SAVED_FP16 = fp16(initial_scale_power=6, min_loss_scale=2, loss_scale_window=100)
OTHER_FP16 = fp16(initial_scale_power=8, min_loss_scale=4, loss_scale_window=200)
#: Stage and sections of the run that saves and of the one that goes on; its floor, window and scale.
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any], tuple[Any, ...]]] = {
    "stage 0": (0, {}, {}, (None, None, None)),
    "stage 1": (1, {}, {}, (None, None, 1.0)),
    "stage 1, bf16": (1, BF16, BF16, (None, None, 1.0)),
    "stage 3": (3, {}, {}, (None, None, 1.0)),
    "fp16": (2, SAVED_FP16, OTHER_FP16, (4, 200, 2.0**6)),
    "fp16 after float32": (2, {}, OTHER_FP16, (4, 200, 2.0**8)),
    "fixed fp16 after fp16": (3, SAVED_FP16, fp16(loss_scale=32), (None, None, 32.0)),
}


def settings(folder: str) -> dict[str, dict[str, Any]]:
    """Return what each fit has that goes on from one with other settings."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch computes in it on any CPU, if slowly
    found = {}
    for name, (stage, before, after, _) in SETTINGS.items():
        path = f"{folder}/settings of {name}.ckpt"
        for which, sections in enumerate((before, after)):
            given = {key: value[which] for key, value in VALUES.items()}
            zero = {"stage": stage, "reduce_bucket_size": given["reduce_bucket_size"]}
            config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", **sections}
            of_trainer = {key: given[key] for key in ("gradient_clip_val", "accumulate_grad_batches")}
            runner = trainer(config, adapt=False, max_epochs=2, max_steps=which + 1, **of_trainer)
            batches = data(int(given["batch_size"]), 4 * GLOBAL_BATCH)
            runner.fit(Settings(given), batches, ckpt_path=path if which else None)
            if not which:
                runner.save_checkpoint(path)
        found[name] = settings_of(runner)
    return found


# -- all of it, in one group of ranks --------------------------------------------------------------------------


def all_of_it(folder: str) -> tuple[Any, ...]:
    write(folder, WRITTEN)
    if torch.distributed.get_rank() == 0:
        write_of_nodes(Path(folder))
    torch.distributed.barrier()
    refused = refusals(2, folder, {"turned in stage 0": Turned("AdamW"), "SGD in stage 0": Net("SGD")})
    return go_on(folder), {**refused, "unsaved": unsaved(folder)}, blocks(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    one, other = run_ranks(2, all_of_it, str(tmp_path_factory.mktemp("two ranks")), timeout=240)
    assert one == other
    return one  # type: ignore[no-any-return]


def test_each_value_goes_to_the_parameter_of_its_name(found: Any) -> None:
    assert not any(found[0].values()), found[0]


def test_what_cannot_go_on_is_one_error_of_all_ranks(found: Any) -> None:
    said = dict(found[1])
    assert "expected the same order of parameters in the optimizer. Or go on" in said.pop("turned in stage 0")
    assert "another optimizer than this run's SGD" in said.pop("SGD in stage 0")
    assert "holds no values of second.weight, second.bias, because in stage 3" in said.pop("unsaved")
    check_refused(said)


def test_a_state_that_cannot_be_told_apart_goes_on_in_its_order(found: Any) -> None:
    goes_on, refused = found[2]
    assert goes_on
    assert "the optimizer keeps 'block' (3), neither one number nor one for each weight" in refused[0]
    assert "expected the same order of parameters in the optimizer" in refused[0]
    assert "another optimizer than this run's SGD: its options are length and not" in refused[1]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    one, _ = run_ranks(2, settings, str(tmp_path_factory.mktemp("settings")), timeout=240)
    return one  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", VALUES)
def test_a_resumed_fit_has_the_value_that_wins(value: str, kept: Any) -> None:
    saved, given, winner = VALUES[value]
    found = {case: of_case[value] for case, of_case in kept.items() if of_case[value] is not None}
    assert found == dict.fromkeys(found, saved if winner == "checkpoint" else given)
    assert set(SETTINGS) - set(found) <= {"stage 0"}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_loss_scale_goes_on_only_where_both_runs_adapt_it(case: str, kept: Any) -> None:
    assert kept[case]["loss scale"] == SETTINGS[case][3]
