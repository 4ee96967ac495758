"""``notebook_launcher`` without Jupyter, called by a program as by a cell; kernels: tests/environments/notebook."""

from __future__ import annotations

import re
import sys

import pytest

from tests.harness import run_script

PROGRAM = """
import os, signal, sys, time
import lightning as L
import torch
import torch.distributed as dist
from lightning_lockstep import Preempted, notebook_launcher

torch.set_num_threads(2)
matrix = torch.ones(1000, 1000)
_ = matrix @ matrix  # starts threads of OpenMP, which no fork has


def rank():
    return int(os.environ["RANK"])


def adds(word, tensor):
    if rank() == 0:
        dist.init_process_group("gloo")
        print(word, "from rank", rank(), flush=True)
    else:
        print(word, "from rank", rank(), flush=True)
        dist.init_process_group("gloo")
    product = (tensor @ tensor).sum()
    dist.all_reduce(product)
    dist.destroy_process_group()
    return {"rank": rank(), "sum": product.item()}


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(strategy, devices=2):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "devices": devices, "max_steps": 2, **dict.fromkeys(off, False)}
    model = Net()
    before = model.layer.weight.clone()
    L.Trainer(strategy=strategy, **options).fit(model, torch.utils.data.DataLoader(torch.ones(16, 4), 4))
    return not torch.equal(before, model.layer.weight)


def one_raises():
    if rank() == 1:
        raise ValueError("boom")
    dist.init_process_group("gloo")  # waits for the other one


def all_raise():
    raise KeyError("it")


def all_leave():
    raise Preempted("rank 1: SIGTERM", 75, "last.ckpt")


def one_dies(end):
    if rank() == 1:
        end()
    time.sleep(1000)


CELLS = {
    "result": lambda: notebook_launcher(adds, ("hello", matrix), num_processes=2),
    "again": lambda: (notebook_launcher(adds, ("again", matrix), 2)["sum"], (matrix @ matrix).sum().item()),
    "large": lambda: len(notebook_launcher(lambda: torch.zeros(1_000_000), (), 2)),
    "one": lambda: notebook_launcher(os.getpid, (), 1) == os.getpid(),
    "fit": lambda: notebook_launcher(fit, ("lockstep_ddp",), 2),
    "strategy": lambda: fit("lockstep_ddp_notebook"),
    "more": lambda: notebook_launcher(fit, ("lockstep_ddp", 3), 2),
    "fewer": lambda: notebook_launcher(fit, ("lockstep_ddp", 1), 2),
    "raises": lambda: notebook_launcher(one_raises, (), 2, grace_period=1),
    "all": lambda: notebook_launcher(all_raise, (), 2),
    "left": lambda: notebook_launcher(all_leave, (), 2),
    "killed": lambda: notebook_launcher(
        one_dies, (lambda: os.kill(os.getpid(), signal.SIGKILL),), 2, grace_period=0.5
    ),
    "exits": lambda: notebook_launcher(one_dies, (lambda: os._exit(3),), 2, grace_period=0.5),
    "interrupted": lambda: notebook_launcher(
        one_dies, (lambda: os.kill(os.getpid(), signal.SIGINT),), 2, grace_period=0.5
    ),
    "wrong": lambda: notebook_launcher(rank, rank, 0),
}
for name, cell in CELLS.items():
    print("#### " + name, flush=True)
    try:
        print("result:", cell(), flush=True)
    except Preempted as left:
        print("left:", left.reason, left.code, left.checkpoint, flush=True)
    except (Exception, KeyboardInterrupt) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """What each of the cells shows."""
    outcome = run_script([sys.executable, "-c", PROGRAM], timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert outcome.leftovers == ()
    parts = outcome.stdout.split("#### ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def test_all_ranks_print_and_the_result_is_that_of_rank_0(shown: dict[str, str]) -> None:
    *printed, result = shown["result"].splitlines()
    assert sorted(printed) == ["hello from rank 0", "hello from rank 1"]
    assert result == "result: {'rank': 0, 'sum': 2000000000.0}"
    assert "result: (2000000000.0, 1000000000.0)" in shown["again"]
    assert shown["large"] == "result: 1000000\n"


def test_one_process_is_the_program_itself(shown: dict[str, str]) -> None:
    assert shown["one"] == "result: True\n"


def test_a_trainer_uses_the_ranks_or_starts_them_and_brings_the_weights_back(shown: dict[str, str]) -> None:
    assert "result: True" in shown["fit"] and "result: True" in shown["strategy"]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("raises", r"RankFailedError: rank 1 of 2 \(host .*\) failed: ValueError: boom"),
        ("more", r"LaunchError: devices=3 and num_nodes=1 ask for 3 ranks, but 2 were started"),
        ("fewer", r"LaunchError: devices=1 and num_nodes=1 ask for 1 rank, but 2 were started"),
        ("all", r"RankFailedError: rank [01] of 2 .* failed: KeyError: 'it'"),
        ("killed", r"(?s)RankFailedError: rank 1 of 2 \(.*\) was killed by SIGKILL.*make the model once"),
        ("interrupted", r"KeyboardInterrupt: $"),
        ("exits", r"RankFailedError: rank 1 of 2 .* ended: exit code 3"),
    ],
)
def test_ranks_that_fail_are_one_error_in_the_cell(shown: dict[str, str], name: str, error: str) -> None:
    assert re.search(error, shown[name]), shown[name]


def test_ranks_that_leave_together_say_why_with_which_code_and_checkpoint(shown: dict[str, str]) -> None:
    assert shown["left"] == "left: rank 1: SIGTERM 75 last.ckpt\n"


def test_what_cannot_be_used_is_one_message(shown: dict[str, str]) -> None:
    said = shown["wrong"]
    assert said.startswith("ConfigurationError")
    for part in (
        "for one argument write args=(argument,).",
        "num_processes=0: expected a whole number from 1, such as 2, or None.",
    ):
        assert part in said
