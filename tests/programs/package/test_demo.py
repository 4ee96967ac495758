"""The demo's own command line, as `scripts/demo` runs it: two ranks, real data, a result that can be used."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from tests.harness import run_script

ROOT = Path(__file__).resolve().parents[3]
COMMAND = Path(sys.executable).parent / "lockstep-train"


def test_two_ranks_learn_to_read_digits(tmp_path: Path) -> None:
    text = (ROOT / "scripts" / "demo").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("train=(", '"${train[@]}"'))]
    (always, training) = (shlex.split(line.removeprefix("train=").strip("()")) for line in lines)
    overrides = [word for word in (*always, *training) if "=" in word]
    # As a user's process, with all that torchmetrics imports.
    done = run_script([COMMAND, *overrides], timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert done.leftovers == ()
    accuracy = re.search(r"val_acc\s+│\s+([0-9.]+)", done.stdout)
    assert accuracy is not None, done.output
    assert float(accuracy.group(1)) >= 0.95
    assert re.search(r"^ *1 +\S+ +cpu ", done.output, re.MULTILINE), "no row of rank 1 in the placement table"
    # A console command whose function returns something exits with it: printed, and not with 0.
    assert not re.search(r"^[0-9.]+$", done.output, re.MULTILINE), "a return value was taken for an exit code"
    (run,) = (tmp_path / "outputs" / "train").iterdir()
    assert (run / "checkpoints" / "best.ckpt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"], "something was written elsewhere"
