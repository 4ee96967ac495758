"""A module whose checkpoints have names of their own: each of its weights is saved and loaded, or an error names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_lockstep import ConfigurationError, LockstepDDPStrategy, LockstepDeepSpeedStrategy
from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate
from tests.harness import run_ranks
from tests.models.deepspeed.run_config import loader as data
from tests.models.deepspeed.run_config import trainer


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
# Kind and stage of a fit.
Case = tuple[str, int]
CASES: list[Case] = [("hooked", 0), ("prefixed", 2), ("hooked", 3), ("adapters", 3)]


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


def trainer_of(strategy: Any, epochs: int) -> Trainer:
    return trainer(strategy, max_epochs=epochs, callbacks=[Look()])


def fit(net: Net, stage: int, *, epochs: int = 2, save: str = "", **given: Any) -> Look:
    options = {"exclude_frozen_parameters": given.pop("exclude_frozen_parameters", False)}
    runner = trainer_of(LockstepDeepSpeedStrategy(stage=stage, **options), epochs)
    runner.fit(net, data(6, 48), **given)
    if save:
        runner.save_checkpoint(save)
    return runner.callbacks[0]  # type: ignore[attr-defined,no-any-return]


def write(folder: str) -> None:
    for kind, stage in CASES:
        path = f"{folder}/{kind}-{stage}"
        look = fit(KINDS[kind](), stage, epochs=1, save=f"{path}.ckpt")
        if torch.distributed.get_rank() == 0:
            torch.save(look.end, f"{path}.truth")
    fit(Net(), 3, epochs=1, save=f"{folder}/short.ckpt", exclude_frozen_parameters=True)
    runner, net = trainer(LockstepDDPStrategy()), Prefixed()
    runner.fit(net, data(6, 48))
    runner.save_checkpoint(f"{folder}/plain.ckpt")
    if runner.is_global_zero:
        torch.save({**dict(net.named_parameters()), **dict(net.named_buffers())}, f"{folder}/plain.truth")


def resume(folder: str) -> dict[str, Any]:
    """The weights with which each run begins, by where they come from, and errors if some are missing."""
    found: dict[str, Any] = {}
    for kind, stage in CASES:
        path = f"{folder}/{kind}-{stage}.ckpt"
        found[f"{kind}-{stage} to a fit"] = fit(KINDS[kind](7), stage, ckpt_path=path).start
        net = KINDS[kind](7)
        runner = trainer_of(LockstepDeepSpeedStrategy(stage=stage), 1)
        runner.test(net, data(6, 48), ckpt_path=path, verbose=False)
        found[f"{kind}-{stage} to a test"] = weights_of(net)
    found["plain to a fit"] = fit(Prefixed(7), 2, ckpt_path=f"{folder}/plain.ckpt").start
    found["errors"] = [error_of(3, f"{folder}/short.ckpt"), error_of(2, f"{folder}/plain.ckpt")]
    lenient = Net(7)
    lenient.strict_loading = False
    found["allowed"] = fit(lenient, 3, ckpt_path=f"{folder}/short.ckpt").start
    return found


def error_of(stage: int, path: str) -> str:
    try:
        fit(Net(7), stage, ckpt_path=path)
    except (ConfigurationError, RuntimeError) as error:
        return str(error)
    return "no error"


def write_and_resume(folder: str) -> dict[str, Any]:
    write(folder)
    torch.distributed.barrier()
    return resume(folder)


def same(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> bool:
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


def test_each_weight_arrives_or_is_named(tmp_path: Path) -> None:
    for found in run_ranks(2, write_and_resume, str(tmp_path), timeout=120):
        (missing, renamed), allowed = found.pop("errors"), found.pop("allowed")
        for case, start in found.items():
            assert same(start, torch.load(tmp_path / f"{case.partition(' to ')[0]}.truth")), case
        assert 'Missing key(s) in state_dict: "base.weight", "base.bias"' in missing
        assert "set `strict_loading = False`" in missing
        assert '"head.weight"' in renamed and '"net.head.weight"' in renamed
        assert torch.equal(allowed["base.weight"], Net(7).base.weight)
        assert not torch.equal(allowed["head.weight"], Net(7).head.weight)
    for kind, stage in CASES:  # a consolidated file has the names that the module reads
        output = consolidate(tmp_path / f"{kind}-{stage}.ckpt", tmp_path / "consolidated.ckpt")
        net = KINDS[kind].load_from_checkpoint(output, seed=7, map_location="cpu")
        loaded = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        assert same(loaded, torch.load(tmp_path / f"{kind}-{stage}.truth")), (kind, stage)
