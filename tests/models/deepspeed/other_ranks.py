"""Fits that go on from the checkpoint of two ranks on another number of ranks; run in a rank."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_lockstep import ConfigurationError
from lightning_lockstep._lightning import Callback, LightningModule, Trainer
from tests.models.deepspeed.run_config import loader as data
from tests.models.deepspeed.run_config import trainer

GLOBAL_BATCH = 12
# Stage, precision and optimizer of a fit.
CASES = {
    "stage 0": (0, "32-true", "AdamW"),
    "stage 1": (1, "32-true", "AdamW"),
    "stage 2": (2, "32-true", "AdamW"),
    "stage 3": (3, "32-true", "AdamW"),
    "stage 2, SGD": (2, "32-true", "SGD"),
    "stage 1, bf16": (1, "bf16-true", "AdamW"),
    "stage 3, bf16": (3, "bf16-mixed", "AdamW"),
    "stage 2, one group": (2, "32-true", "AdamW of one group"),
    # Four parameters in a group: fewer are in the same order as without.
    "stage 2, round robin": (2, "32-true", "AdamW of one group"),
    "stage 1, bf16, round robin": (1, "bf16-true", "AdamW of one group"),
}
# A checkpoint that goes on in another stage.
CROSSED = {"stage 1": "stage 3", "stage 3": "stage 2"}


class Net(LightningModule):
    """Sizes that neither two nor three ranks divide evenly, a frozen layer, tied weights and a buffer that changes."""

    seen: torch.Tensor

    def __init__(self, optimizer: str, hidden: int = 31) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(8, hidden), torch.nn.Linear(hidden, 3)
        self.again = self.second
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        self.seen += 1
        outputs = self.frozen(self.again(self.first(inputs.to(self.first.weight.dtype)).relu()))
        return torch.nn.functional.cross_entropy(outputs.float(), targets)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.requires_grad and p.dim() > 1]
        vectors = [p for p in self.parameters() if p.requires_grad and p.dim() == 1]
        groups = [{"params": matrices, "lr": 0.02}, {"params": vectors, "lr": 0.01, "weight_decay": 0.0}]
        if self.optimizer == "AdamW of one group":
            groups = [{"params": [p for p in self.parameters() if p.requires_grad]}]
        if self.optimizer == "SGD":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, 0.02)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Look(Callback):
    """Takes down what the engine has when the training starts, and when it ends."""

    def __init__(self) -> None:
        self.start: dict[str, Any] = {}
        self.end: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start = state_of(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end = state_of(trainer)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """All that a fit goes on with, of whole parameters (all ranks together)."""
    from deepspeed.utils import (
        lazy_init_hp_params_optimizer_state,
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    engine: Any = trainer.strategy.model
    if engine.zero_optimization_stage() == 0:
        return undivided_state_of(trainer)
    optimizer = engine.optimizer.optimizer
    if engine.zero_optimization_stage() < 3 and optimizer.state:
        # DeepSpeed 0.19.8 does this when the first group has made its step and the others none.
        vectors = engine.optimizer.single_partition_of_fp32_groups
        if engine.optimizer.round_robin_gradients:
            link_in_round_robin(engine.optimizer)
        for group, vector in zip(engine.optimizer.bit16_groups, vectors, strict=True):
            lazy_init_hp_params_optimizer_state(group, vector, optimizer.state)
    found: dict[str, Any] = {
        "counters": [engine.global_steps, engine.skipped_steps, trainer.global_step],
        "options": [
            {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
        ],
        "steps": sorted({float(entry["step"]) for entry in optimizer.state.values() if "step" in entry}),
        "buffer": trainer.lightning_module.state_dict()["seen"].item(),
        "schedule": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
    }
    keys = sorted({key for entry in optimizer.state.values() for key in entry if key != "step"})
    for name, parameter in trainer.lightning_module.named_parameters():
        if not parameter.requires_grad:
            continue
        found[name] = safe_get_full_fp32_param(parameter).detach().clone()
        for key in keys:
            found[f"{name} {key}"] = safe_get_full_optimizer_state(parameter, key).detach().clone()
    return found


def link_in_round_robin(optimizer: Any) -> None:
    """DeepSpeed 0.19.8 takes the vector to have the order of the group, which it has not."""
    from deepspeed.utils import link_hp_params

    for number, group in enumerate(optimizer.bit16_groups):
        places = zip(
            optimizer.round_robin_bit16_groups[number],
            optimizer.round_robin_bit16_offsets[number],
            strict=True,
        )
        offsets = {id(parameter): offset for parameter, offset in places}
        length = optimizer.single_partition_of_fp32_groups[number].numel()
        link_hp_params(
            lp_param_list=group,
            flat_hp_partition=optimizer.single_partition_of_fp32_groups[number],
            gradient_dict={},
            offload_gradient_dict={},
            use_offload=False,
            param_group_index=number,
            partition_start=torch.distributed.get_rank() * length,
            partition_size=length,
            dp_group=optimizer.real_dp_process_group[number],
            param_offsets=[offsets[id(parameter)] for parameter in group],
        )


def undivided_state_of(trainer: Trainer) -> dict[str, Any]:
    """The same of stage 0, where DeepSpeed leaves torch's optimizer alone."""
    engine: Any = trainer.strategy.model
    found: dict[str, Any] = {"counters": [engine.global_steps, engine.skipped_steps, trainer.global_step]}
    for name, parameter in trainer.lightning_module.named_parameters():
        if parameter.requires_grad:
            found[name] = parameter.detach().clone()
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                found[f"{name} {key}"] = value.clone()
    return found


def loader(ranks: int) -> DataLoader[Any]:
    return data(GLOBAL_BATCH // ranks, 4 * GLOBAL_BATCH)


def trainer_of(ranks: int, case: str, epochs: int, *callbacks: Callback, local: bool = False) -> Trainer:
    stage, precision, _ = CASES[case]
    config: dict[str, Any] = {"zero_optimization": {"stage": stage, "round_robin_gradients": "round robin" in case}}
    if local:
        config["checkpoint"] = {"use_node_local_storage": True}
    options = {"precision": precision, "devices": ranks, "max_epochs": epochs, "callbacks": [*callbacks]}
    return trainer(config, adapt=False, **options)


def evaluated(ranks: int, case: str, ckpt_path: str) -> dict[str, torch.Tensor]:
    """Return the whole weights of a test with a checkpoint."""
    import deepspeed

    net = Net(CASES[case][2])
    torch.nn.init.zeros_(net.first.weight)
    trainer_of(ranks, case, 1).test(net, loader(ranks), ckpt_path=ckpt_path, verbose=False)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        return {name: value.detach().clone() for name, value in net.named_parameters() if value.requires_grad}


def fit(
    ranks: int,
    case: str,
    *,
    epochs: int,
    ckpt_path: str | None = None,
    net: Net | None = None,
    save: str = "",
    weights_only: bool | None = None,
    local: bool = False,  # each node writes to its own disk
) -> tuple[Look, Trainer]:
    optimizer = CASES[case][2]
    look = Look()
    runner = trainer_of(ranks, case, epochs, look, local=local)
    runner.fit(net or Net(optimizer), loader(ranks), ckpt_path=ckpt_path, weights_only=weights_only)
    if save:
        runner.save_checkpoint(save)
    return look, runner


def write(folder: str, cases: list[str]) -> None:
    for case in cases:
        look, runner = fit(2, case, epochs=1, save=f"{folder}/{case}.ckpt")
        if runner.is_global_zero:
            torch.save(look.end, f"{folder}/{case}.truth")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        damage(Path(folder))


def resume(ranks: int, folder: str, cases: list[str], crossed: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    straight: dict[Any, dict[str, Any]] = {}
    for case in cases:
        stage, precision, optimizer = CASES[case]
        numbers = stage > 0, precision, optimizer
        if numbers not in straight:  # one for stages 1 to 3, which have the same numbers
            straight[numbers] = fit(ranks, case, epochs=2)[0].end
        resumed, _ = fit(ranks, case, epochs=2, ckpt_path=f"{folder}/{case}.ckpt")
        found[case] = resumed.start, resumed.end, straight[numbers]
    for source, target in crossed.items():
        resumed, _ = fit(ranks, target, epochs=2, ckpt_path=f"{folder}/{source}.ckpt")
        found[f"{source} to {target}"] = resumed.start, resumed.end, found[target][2]
    if crossed:
        found["refused"] = refusals(ranks, folder)
    return found


def refusals(ranks: int, folder: str, in_stage_0: dict[str, Net] | None = None) -> dict[str, str]:
    """What is said of checkpoints from which no fit can go on, and of that of stage 0 with other modules."""

    def text(case: str, source: str, net: Net | None = None) -> str:
        try:
            fit(ranks, case, epochs=2, ckpt_path=f"{folder}/{source}", net=net)
        except ConfigurationError as error:
            return str(error)
        return "no error"

    return {
        "a missing file": text("stage 2", "missing.ckpt"),
        "a cut file": text("stage 3", "cut.ckpt"),
        "another model": text("stage 2", "stage 2.ckpt", Net("AdamW", hidden=32)),
        "stage 0 on one side": text("stage 0", "stage 1.ckpt"),
        "another optimizer": text("stage 1", "stage 1.ckpt", Net("SGD")),
        **{name: text("stage 0", "stage 0.ckpt", net) for name, net in (in_stage_0 or {}).items()},
    }


def damage(folder: Path) -> None:
    """Make copies of checkpoints of stage 2 and 3 from which no fit can go on."""
    for source, name in (("stage 2", "missing"), ("stage 3", "cut")):
        shutil.copytree(folder / f"{source}.ckpt", folder / f"{name}.ckpt")
    file = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / "missing.ckpt" / "checkpoint" / file).unlink()
    cut = folder / "cut.ckpt" / "checkpoint" / file
    cut.write_bytes(cut.read_bytes()[:2000])


def differences(found: dict[str, Any], expected: dict[str, Any], *, mean: bool = False) -> dict[str, float]:
    tensors = {name: value for name, value in expected.items() if isinstance(value, torch.Tensor)}
    apart = {name: (found[name].float() - value.float()).abs() for name, value in tensors.items()}
    return {name: (value.mean() if mean else value.max()).item() for name, value in apart.items()}


def check(of_rank: dict[str, Any], folder: Path) -> None:
    """Compare what a resumed fit begins and ends with, and what is said of checkpoints that it cannot go on from."""
    refused = of_rank.pop("refused", None)
    for case, (start, end, straight) in of_rank.items():
        truth = torch.load(folder / f"{case.partition(' to ')[0]}.truth", weights_only=False)
        names = {name for name, value in truth.items() if isinstance(value, torch.Tensor)}
        assert names == {name for name, value in start.items() if isinstance(value, torch.Tensor)}, case
        assert not any(differences(start, truth).values()), case  # bit for bit
        assert {k: v for k, v in start.items() if k not in names} == {
            k: v for k, v in truth.items() if k not in names
        }, case
        # Sums over ranks in another order. In bf16 a gradient near zero can be rounded to the other side of it, and
        # Adam moves by its sign, so only the mean is held there.
        found, tolerance = differences(end, straight, mean="bf16" in case), 2e-3 if "bf16" in case else 1e-5
        assert max(found.values()) < tolerance, (case, found)
        assert {k: v for k, v in end.items() if k not in names} == {
            k: v for k, v in straight.items() if k not in names
        }, case
    if refused is not None:
        check_refused(refused)


def check_refused(refused: dict[str, str]) -> None:
    assert "missing: zero_pp_rank_1_mp_rank_00_optim_states.pt" in refused["a missing file"]
    assert "cannot be read" in refused["a cut file"]
    assert "is a checkpoint of another model" in refused["another model"] and "first.weight" in refused["another model"]
    assert "expected the same stage (1 in the checkpoint, 0 in this run). Or" in refused["stage 0 on one side"]
    assert "another optimizer than this run's SGD" in refused["another optimizer"]


class Thing:
    """An object that only pickled code can make."""


class Keeps(Net):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = type(checkpoint.get("thing")).__name__


def objects_found(path: str) -> tuple[str, str]:
    """What is said of an object in a checkpoint, and what is made of it if the checkpoint is trusted."""
    net = Keeps("AdamW")
    try:
        fit(1, "stage 2", epochs=2, ckpt_path=path, net=net)
        said = "no error"
    except ConfigurationError as error:
        said = str(error)
    fit(1, "stage 2", epochs=2, ckpt_path=path, net=net, weights_only=False)
    return said, net.found
