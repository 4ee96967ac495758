"""What the processes of tests are spared, and what they see all the same."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import run_script

PROGRAM = """
import sys
import torchmetrics
from importlib.metadata import version
hidden = ("matplotlib", "scipy", "transformers")
print("imported:", *(name for name in hidden if name in sys.modules))
import scipy.optimize, sklearn.datasets
print("found:", version("scipy") == scipy.__version__)
"""


@pytest.mark.parametrize("show", [False, True])
def test_optional_packages_are_hidden_from_torchmetrics_alone(show: bool) -> None:
    env = {"LOCKSTEP_TESTS_SHOW_ALL": "1" if show else None}
    outcome = run_script([sys.executable, "-c", PROGRAM], env=env, timeout=180, fresh=True)
    assert outcome.returncode == 0, outcome.output
    imported, found = outcome.stdout.splitlines()
    assert ("scipy" in imported.split()) == show
    assert show or imported == "imported:"
    assert found == "found: True"


COMPILING = """
import sys, torch
import lightning.pytorch
from lightning.pytorch.utilities.compile import OptimizedModule
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print("imported:", "torch._dynamo.eval_frame" in sys.modules)
compiled = torch.compile(model, backend="eager")
print(compiled(torch.ones(1, 2)).shape == (1, 2), isinstance(compiled, OptimizedModule))
import torch._dynamo.utils
from torch._dynamo import config
print(torch._dynamo is sys.modules["torch._dynamo"], config.optimize_ddp)
optimizer.step()
"""


def test_torchs_compiler_is_imported_when_something_is_compiled() -> None:
    outcome = run_script([sys.executable, "-c", COMPILING], timeout=180, fresh=True)
    assert outcome.returncode == 0, outcome.output
    assert outcome.stdout.split("\n")[:3] == ["imported: False", "True True", "True True"]


def test_lines_of_several_processes_do_not_meet() -> None:
    child = "for i in range(2000): print('a' * 40)"
    text = (
        "import subprocess, sys\n"
        f"children = [subprocess.Popen([sys.executable, '-c', {child!r}]) for _ in range(4)]\n"
        "sys.exit(max(child.wait() for child in children))\n"
    )
    outcome = run_script([sys.executable, "-c", text])
    assert outcome.returncode == 0, outcome.output
    assert set(outcome.stdout.splitlines()) == {"a" * 40}
    assert outcome.stdout.count("\n") == 8000
