"""Modules whose checkpoints have names of their own, saved and loaded in each stage; run in a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy, LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate
from tests.common.deepspeed.run_config import loader as data
from tests.common.deepspeed.run_config import trainer


class Net(LightningModule):
    """A frozen layer, tied weights, a buffer, and parameters of which stage 3 keeps a part on each rank."""

    seen: torch.Tensor

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(8, 8).requires_grad_(False)
        self.middle, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        self.again = self.middle
        self.register_buffer("seen", torch.tensor(0))

    def step(self, batch: Any) -> torch.Tensor:
        x = self.again(self.middle(self.base(batch[0].to(self.base.weight.dtype)).relu()).relu())
        return torch.nn.functional.cross_entropy(self.head(x).float(), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return self.step(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.step(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.02)


class Prefixed(Net):
    """As where a LightningModule wraps a network whose own checkpoints it reads and writes."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"net.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        bare = {name.removeprefix("net."): value for name, value in state.items()}
        return super().load_state_dict(bare, strict, assign)


class Hooked(Net):
    """As where weights of a compiled module lose and get back a part of their names."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name[4:]: value for name, value in checkpoint["state_dict"].items()}


class Adapters(Net):
    """As with PEFT: the frozen base comes from elsewhere, and is in no checkpoint."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        for parameter in self.base.parameters():
            torch.nn.init.constant_(parameter, 0.3)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {f"adapter.{name}": value for name, value in state.items() if not name.startswith("base")}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        found = super().load_state_dict({name[8:]: value for name, value in state.items()}, False, assign)
        assert not found.unexpected_keys
        return found


KINDS = {"prefixed": Prefixed, "hooked": Hooked, "adapters": Adapters}
# Kind, stage and precision of a fit.
Case = tuple[str, int, str]
CASES: list[Case] = [
    *[("prefixed", stage, "32-true") for stage in (1, 2, 3)],
    *[("prefixed", stage, "bf16-true") for stage in (2, 3)],
    *[("hooked", stage, "32-true") for stage in (0, 2, 3)],
    ("adapters", 3, "32-true"),
]
CROSSED = {1: 3, 3: 2}  # a checkpoint that goes on in another stage


class Look(Callback):
    """Takes down the whole weights when the training starts and ends, and which way they came."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = weights_of(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end = weights_of(pl_module)


def weights_of(module: LightningModule) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        found = [*module.named_parameters(), *module.named_buffers()]
        return {name: value.detach().clone() for name, value in found}


def trainer_of(strategy: Any, ranks: int, epochs: int, precision: str = "32-true") -> Trainer:
    return trainer(strategy, precision=precision, devices=ranks, max_epochs=epochs, callbacks=[Look()])


def loader(ranks: int) -> DataLoader[Any]:
    return data(12 // ranks, 48)


def fit(
    net: Net, ranks: int, stage: int, precision: str = "32-true", *, epochs: int = 2, **given: Any
) -> Look:
    options = {"exclude_frozen_parameters": given.pop("exclude_frozen_parameters", False)}
    save = given.pop("save", None)
    runner = trainer_of(LockstepDeepSpeedStrategy(stage=stage, **options), ranks, epochs, precision)
    runner.fit(net, loader(ranks), **given)
    if save:
        runner.save_checkpoint(save)
    return runner.callbacks[0]  # type: ignore[attr-defined,no-any-return]


def name_of(case: Case) -> str:
    return "-".join(map(str, case))


def write(folder: str, cases: list[Case], short: list[int]) -> None:
    for kind, stage, precision in cases:
        path = f"{folder}/{name_of((kind, stage, precision))}"
        look = fit(KINDS[kind](), 2, stage, precision, epochs=1, save=f"{path}.ckpt")
        if torch.distributed.get_rank() == 0:
            torch.save(look.end, f"{path}.truth")
    for stage in short:
        fit(Net(), 2, stage, epochs=1, save=f"{folder}/short-{stage}.ckpt", exclude_frozen_parameters=True)
    runner = trainer_of(LockstepDDPStrategy(), 2, 1)
    runner.callbacks.clear()  # type: ignore[attr-defined]
    net = Prefixed()
    runner.fit(net, loader(2))
    runner.save_checkpoint(f"{folder}/plain.ckpt")
    if runner.is_global_zero:
        torch.save({**dict(net.named_parameters()), **dict(net.named_buffers())}, f"{folder}/plain.truth")


def resume(
    ranks: int, folder: str, cases: list[Case], *, short: list[int], plain: list[int], crossed: dict[int, int]
) -> dict[str, Any]:
    """The weights with which each run begins, by where they come from and the stage, and errors if some are missing."""
    found: dict[str, Any] = {}
    for kind, stage, precision in cases:
        name = name_of((kind, stage, precision))
        path = f"{folder}/{name}.ckpt"
        for to in {stage, crossed.get(stage, stage)} if precision == "32-true" else {stage}:
            found[f"{name} to {to}"] = fit(KINDS[kind](7), ranks, to, precision, ckpt_path=path).start
        net = KINDS[kind](7)
        runner = trainer_of(LockstepDeepSpeedStrategy(stage=stage), ranks, 1, precision)
        runner.test(net, loader(ranks), ckpt_path=path, verbose=False)
        found[f"{name} to a test in {stage}"] = weights_of(net)
    path = f"{folder}/plain.ckpt"
    for stage in plain:
        found[f"plain to {stage}"] = fit(Prefixed(7), ranks, stage, ckpt_path=path).start
    if ranks == 2:
        found["errors"] = {stage: error_of(ranks, stage, f"{folder}/short-{stage}.ckpt") for stage in short}
        found["plain errors"] = {stage: error_of(ranks, stage, path) for stage in plain if stage > 0}
        found["allowed"] = {
            stage: fit(lenient(), ranks, stage, ckpt_path=f"{folder}/short-{stage}.ckpt").start
            for stage in short
        }
    return found


def error_of(ranks: int, stage: int, path: str) -> str:
    try:
        fit(Net(7), ranks, stage, ckpt_path=path)
    except (ConfigurationError, RuntimeError) as error:
        return str(error)
    return "no error"


def lenient() -> Net:
    net = Net(7)
    net.strict_loading = False
    return net


def write_and_resume(folder: str, cases: list[Case], options: dict[str, Any]) -> dict[str, Any]:
    write(folder, cases, options["short"])
    torch.distributed.barrier()
    return resume(2, folder, cases, **options)


def same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> bool:
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


def check(found: dict[str, Any], folder: Path) -> None:
    errors, plain_errors, allowed = (found.pop(key, {}) for key in ("errors", "plain errors", "allowed"))
    for case, start in found.items():
        assert same(start, torch.load(folder / f"{case.partition(' to ')[0]}.truth")), case
    for text in errors.values():
        assert 'Missing key(s) in state_dict: "base.weight", "base.bias"' in text
        assert "set `strict_loading = False`" in text
    for text in plain_errors.values():
        assert '"head.weight"' in text and '"net.head.weight"' in text
    for start in allowed.values():
        assert torch.equal(start["base.weight"], Net(7).base.weight)
        assert not torch.equal(start["head.weight"], Net(7).head.weight)


def check_consolidated(folder: Path, cases: list[Case]) -> None:
    """A consolidated file has the names that the module reads."""
    for case in cases:
        name = name_of(case)
        output = consolidate(folder / f"{name}.ckpt", folder / "consolidated.ckpt")
        net = KINDS[case[0]].load_from_checkpoint(output, seed=7, map_location="cpu")
        truth = torch.load(folder / f"{name}.truth")
        loaded = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        assert same({k: v.detach().to(truth[k].dtype) for k, v in loaded.items()}, truth), name
        if case[2] == "bf16-true":  # the optimizer's copies, of which the weights of the model are a rounding
            assert not torch.equal(loaded["head.weight"], loaded["head.weight"].bfloat16().float()), name
