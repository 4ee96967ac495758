"""From the report to the command line: the remedy, pasted as it is printed, lets the failing run pass."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from tests.helpers import run_script

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = """
from lightning.pytorch import LightningDataModule
from overflow_t5 import T5Task, batches


class Data(LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()

    def train_dataloader(self):
        return batches(rank=self.trainer.global_rank, bad_rank=1)
"""
TRAIN = (
    "--config-dir conf model=net data=net precision=16-mixed debug=overflow strategy.find_unused_parameters=true"
    " trainer.devices=2 trainer.accelerator=cpu trainer.max_epochs=1 trainer.use_distributed_sampler=false"
    " checkpoint=none validate=false test=false"
)


def test_the_remedy_pasted_into_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    for group, text in (("model", "_target_: own.T5Task\n"), ("data", "_target_: own.Data\nbatch_size: 4\n")):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "net.yaml").write_text(text)
    paths = [str(tmp_path), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    train = [sys.executable, "-m", "lightning_lockstep.train", *TRAIN.split()]

    failed = run_script(train, timeout=180, env=environment, cwd=tmp_path)
    assert failed.returncode not in (0, None), failed.output
    assert failed.stderr.count("Detected inf/nan during batch_number=3 (epoch 0, batch 3, step 3)") >= 1
    assert failed.stderr.count("--- rank 1 on host") == 1, "the report is printed once"
    pasted = set(re.findall(r"on the command line:\s+(\S+)", failed.stderr))
    assert pasted == {"'callbacks.fp32_modules.modules=[model.encoder.block.0.layer.1.DenseReluDense]'"}
    [run] = (tmp_path / "outputs" / "train").iterdir()
    assert (run / "overflow" / "batch-3.png").stat().st_size > 10_000

    passed = run_script([*train, *shlex.split(pasted.pop())], timeout=180, env=environment, cwd=tmp_path)
    assert passed.returncode == 0, passed.output
    assert "Detected inf/nan" not in passed.output
