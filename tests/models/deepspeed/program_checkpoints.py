"""Writes checkpoints with real DeepSpeed engines; run as a program, loads them where DeepSpeed cannot be imported.

``python program_checkpoints.py FOLDER``: consolidates each checkpoint of the folder and loads it into the model.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},  # by default the first steps overflow, and are skipped
}

#: What a checkpoint of each name is written with, besides what all have.
CONFIGS: dict[str, dict[str, Any]] = {
    f"stage_{stage}_{dtype}": {
        "zero_optimization": {"stage": stage},
        **precision,
    }
    for stage in (0, 1, 2, 3)
    for dtype, precision in PRECISIONS.items()
}
CONFIGS |= {
    # Another optimizer of DeepSpeed, with other files; its own converter does not take them.
    "bf16_optimizer": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "aligned": {
        "zero_optimization": {"stage": 2, "parameter_alignment": True},
        "bf16": {"enabled": True},
    },
    "round_robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "sub_groups": {"zero_optimization": {"stage": 3, "sub_group_size": 20}, "bf16": {"enabled": True}},
    # Here the model is made in parts, as configure_model() of Lightning does it.
    "zero_init": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "no_frozen": {"zero_optimization": {"stage": 3}},
    "no_frozen_2": {"zero_optimization": {"stage": 2}},
}


class Net(lightning.LightningModule):
    """A model with all that can go wrong: odd sizes, tied and frozen parameters, buffers."""

    # Parameters without a dimension cannot go wrong: DeepSpeed 0.19.8 takes none.

    _version = 3

    mean: Tensor
    steps: Tensor
    cache: Tensor

    def __init__(self, width: int = 5, options: Any = None, root: Any = None, table: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.hidden = nn.Linear(width, 7)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(7, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.full([1], 1.5))
        self.odd = nn.Parameter(torch.arange(7.0) / 3)
        self.twin = self.odd
        self.again = self.hidden
        self.frozen_scale = nn.Parameter(torch.full([1], 0.3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.frozen(self.embedding(words)) * self.frozen_scale
        x = self.norm(self.hidden(x)) * self.scale + self.odd
        self.mean += (x.detach().mean(0) - self.mean) / 10
        self.steps += 1
        return nn.functional.cross_entropy(self.head(self.out(x).relu()).float(), words)


def write_checkpoints(folder: str, names: list[str]) -> None:
    """Train a model under each config, save it, and beside it the weights that it really had (all ranks)."""
    for name in names:
        engine = trained_engine(CONFIGS[name], made_in_parts=name == "zero_init")
        exclude = name.startswith("no_frozen")
        weights = true_weights(engine, exclude)
        path = Path(folder, f"{name}.ckpt")
        state = client_state()
        engine.save_checkpoint(str(path), client_state=state, tag="checkpoint", exclude_frozen_parameters=exclude)
        if torch.distributed.get_rank() == 0:
            torch.save(weights, path.with_suffix(".truth"))
        engine.destroy()
    torch.distributed.barrier()


def trained_engine(config: dict[str, Any], made_in_parts: bool) -> Any:
    import deepspeed

    # gloo does it, and nothing is compiled; to read the table would be to probe all operations.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, **config}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=made_in_parts):
        model = Net()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=rank),
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        config=config,
        dist_init_required=False,
    )
    torch.manual_seed(rank)
    for _ in range(3):
        engine.backward(engine(torch.randint(11, (4,))))
        engine.step()
    return engine


def true_weights(engine: Any, exclude_frozen: bool) -> dict[str, dict[str, Tensor]]:
    """The whole weights, in the dtype of the model and as float32 of the optimizer (all ranks together)."""
    import deepspeed

    module = engine.module
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        saved = {name: value.detach().clone() for name, value in module.state_dict().items()}
    full_precision = {name: v.float() if v.is_floating_point() else v for name, v in saved.items()}
    masters = true_masters(engine)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter in masters:
            full_precision[name] = masters[parameter].view(saved[name].shape)
        if exclude_frozen and not parameter.requires_grad:
            del saved[name], full_precision[name]
    return {"float32": full_precision, "as_saved": saved}


def true_masters(engine: Any) -> dict[Tensor, Tensor]:
    """The optimizer's copies of the weights in half precision."""
    # DeepSpeed's function for them does not know stage 0, and with round_robin_gradients mixes parameters up.
    from deepspeed.utils import safe_get_full_fp32_param

    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if trained[0].dtype == torch.float32:
        return {}
    if hasattr(engine.optimizer, "fp32_groups"):
        return {}  # stage 0, which saves its copies without names
    return {parameter: safe_get_full_fp32_param(parameter).detach().clone() for parameter in trained}


def truth(folder: Path, dtype: str = "float32") -> dict[str, Tensor]:
    """The weights that the model had when it wrote a checkpoint."""
    weights: dict[str, Tensor] = torch.load(folder.with_suffix(".truth"))[dtype]
    return weights


def compare(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    wrong = {
        name: (found[name], value)
        for name, value in expected.items()
        if found[name].dtype != value.dtype or not torch.equal(found[name], value)
    }
    assert not wrong


def check_consolidated(folder: Path, output: Path) -> None:
    """Consolidate a checkpoint with each dtype, and compare all weights."""
    from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate, consolidated

    found = consolidated(folder)["state_dict"]
    compare(found, truth(folder))
    for name, other in (("head", "embedding"), ("again", "hidden")):
        assert found[f"{name}.weight"].data_ptr() == found[f"{other}.weight"].data_ptr()
    assert found["hidden.weight"].untyped_storage().nbytes() == 7 * 5 * 4
    assert "cache" not in found
    assert not any(value.requires_grad for value in found.values())
    assert found._metadata[""] == {"version": 3}
    consolidate(folder, output, dtype="as_saved")
    compare(torch.load(output, weights_only=True)["state_dict"], truth(folder, "as_saved"))


def client_state() -> dict[str, Any]:
    """What Lightning hands to DeepSpeed, with some objects that are not plain data."""
    from lightning.fabric.utilities.data import AttributeDict

    table: defaultdict[str, list[int]] = defaultdict(list)
    table["a"].append(1)
    options = AttributeDict(depth=2, nested=AttributeDict(rate=0.1))
    return {
        "epoch": 3,
        "global_step": 12,
        "pytorch-lightning_version": lightning.__version__,
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.25), "dirpath": "/runs"},
            "Custom": {"fine": 1, "object": nn.ReLU()},
        },
        "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1, 0.2]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {
            "width": 5,
            "options": options,
            "root": Path("data") / "words",
            "table": table,
            "activation": nn.ReLU(),
        },
        "Words": {"seen": 7},
        "best": nn.ReLU(),
    }


def main(folder: Path) -> None:
    sys.modules["deepspeed"] = None  # type: ignore[assignment]
    from lightning_lockstep.deepspeed.checkpoints.consolidation import consolidate

    for path in sorted(folder.glob("*.ckpt")):
        truth = torch.load(path.with_suffix(".truth"))["float32"]
        output = consolidate(path, folder / "whole" / path.name)
        model = Net.load_from_checkpoint(output, map_location="cpu", strict=not path.name.startswith("no_frozen"))
        state = model.state_dict()
        wrong = [name for name, value in truth.items() if not torch.equal(state[name], value)]
        tied = model.head.weight is model.embedding.weight
        print(path.stem, "wrong:", wrong, "tied:", tied, "width:", model.embedding.embedding_dim)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
