"""The one module through which Lightning's names come, under both names Lightning is published by."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep._doors import lightning
from tests.helpers import run_script

PROBE = """
import json, sys
{first}
from lightning_lockstep._doors import lightning as door
named = {{name: getattr(door, name) for name in door.NAMES}}
print(json.dumps({{
    "pytorch": door.PYTORCH, "fabric": door.FABRIC,
    "modules": {{name: getattr(value, "__module__", "") for name, value in named.items()}},
    "both": [n for n in ("lightning.pytorch", "pytorch_lightning") if n in sys.modules],
}}))
"""


@functools.cache
def probe(first: str) -> Any:
    code = PROBE.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FIT = """
import sys
import torch
import {family} as pl
import lightning_lockstep

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Tell(pl.Callback):
    def on_fit_end(self, trainer, net):
        weights = " ".join(f"{{value:.6f}}" for value in net.layer.weight.flatten().tolist())
        rank, ranks, steps = trainer.global_rank, trainer.world_size, trainer.global_step
        line = f"rank {{rank}} of {{ranks}} steps {{steps}}: {{weights}}"
        sys.stdout.write(line + "\\n")  # in one piece, also where output is not buffered

if __name__ == "__main__":
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="lockstep_ddp", max_epochs=1, callbacks=[Tell()],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )
    assert isinstance(trainer.strategy, pl.strategies.DDPStrategy), "a strategy of the other family"
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=2))
"""


@pytest.mark.parametrize("family", ["lightning.pytorch", "pytorch_lightning"])
def test_a_real_fit_on_two_ranks(family: str, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT.format(family=family))
    done = run_script([script], timeout=120, fresh=True)
    assert done.returncode == 0, done.output
    assert done.leftovers == ()
    told = {line.split(":")[0]: line.split(":")[1] for line in done.stdout.splitlines() if "steps" in line}
    assert set(told) == {"rank 0 of 2 steps 6", "rank 1 of 2 steps 6"}, done.output
    assert len(set(told.values())) == 1, "the ranks ended with different weights"


@pytest.mark.parametrize(
    ("first", "family"),
    [
        ("", "lightning"),
        ("import pytorch_lightning", "pytorch_lightning"),
        ("import pytorch_lightning, lightning.pytorch", "lightning"),
    ],
)
def test_every_name_resolves_in_the_family_the_program_uses(first: str, family: str) -> None:
    seen = probe(first)
    roots = {
        "lightning": ("lightning.pytorch", "lightning.fabric"),
        "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
    }[family]
    assert (seen["pytorch"], seen["fabric"]) == roots
    strangers = {
        name: module
        for name, module in seen["modules"].items()
        # functions that both families take from lightning_utilities belong to neither
        if module and not module.startswith((*roots, "lightning_utilities"))
    }
    assert strangers == {}


def test_a_program_on_one_family_does_not_get_the_other_too() -> None:
    assert probe("import pytorch_lightning")["both"] == ["pytorch_lightning"]


def test_every_private_name_says_why() -> None:
    assert [name for name, why in lightning.PRIVATE.items() if len(why.split()) < 3] == []


def test_private_names_are_in_the_private_table() -> None:
    assert {name for name in lightning.NAMES if name.startswith("_")} <= set(lightning.PRIVATE)
    assert set(lightning.PRIVATE) <= set(lightning.NAMES)
