"""The examples that README names run as their first lines say; the others: tests/variants/application."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

from tests.harness import run_script, start_script

EXAMPLES = Path(__file__).parents[3] / "examples"


def copied(name: str, tmp_path: Path) -> Path:
    folder = tmp_path / name
    left_out = shutil.ignore_patterns("__pycache__", "outputs", "multirun", "lightning_logs")
    return Path(shutil.copytree(EXAMPLES / name, folder, ignore=left_out))


def test_the_smallest_hydra_project(tmp_path: Path) -> None:
    project = copied("hydra_project", tmp_path)
    outcome = run_script([sys.executable, "train.py"], cwd=project, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert "48 in 3 epochs on 2 ranks" in outcome.stdout
    (run,) = (project / "outputs" / "train").iterdir()
    assert (run / "checkpoints" / "last.ckpt").is_file()


def test_lightning_cli_on_two_ranks(tmp_path: Path) -> None:
    folder = copied("lightning_cli", tmp_path)
    monitor = "--trainer.callbacks+=lightning_lockstep.StragglerMonitor"
    given = ["fit", "--config", "digits.yaml", monitor]
    # Jsonargparse's own, of how Lightning calls it.
    env = {"JSONARGPARSE_DEPRECATION_WARNINGS": "off"}
    outcome = run_script([sys.executable, "train.py", *given], cwd=folder, env=env, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert re.search(r"^2 ranks\n *rank +host .*\n *0 .*\n *1 ", outcome.stderr, re.MULTILINE)
    assert "`max_epochs=2` reached" in outcome.output
    assert "StragglerMonitor: " in outcome.output


def test_an_app_that_has_only_our_configs_prints_what_its_readme_shows(tmp_path: Path) -> None:
    shown = re.findall(r"^python (.*)\n# (.*)$", (EXAMPLES / "foreign_app" / "README.md").read_text(), re.MULTILINE)
    command, printed = next(line for line in shown if "[early_stopping,stop_together]" in line[0])
    prints(command, printed, tmp_path)


def prints(command: str, printed: str, tmp_path: Path) -> None:
    """Run a command line of the app, whose last line must be as shown."""
    app = copied("foreign_app", tmp_path)
    outcome = run_script([sys.executable, *shlex.split(command)], cwd=app, timeout=180)
    assert outcome.returncode == 0, outcome.output
    assert not outcome.leftovers
    assert outcome.stdout.splitlines()[-1] == printed


def test_stopped_by_a_signal_and_resumed(tmp_path: Path) -> None:
    def batches(output: str, rank: int) -> list[tuple[int, int]]:
        return [
            (int(epoch), int(batch))
            for epoch, batch in re.findall(rf"^rank {rank}: epoch (\d+), batch (\d+)$", output, re.MULTILINE)
        ]

    with start_script([EXAMPLES / "resume.py"], cwd=tmp_path) as script:
        script.wait_for("batch 2", timeout=120)
        script.send_signal(signal.SIGTERM)
        stopped = script.finish(120)
    assert stopped.returncode == 75, stopped.output
    seen = batches(stopped.stdout, 0)
    assert seen == batches(stopped.stdout, 1)
    assert seen[-1] < (1, 31)
    with start_script([EXAMPLES / "resume.py"], cwd=tmp_path) as script:
        script.wait_for(r"rank 0: epoch \d+, batch", timeout=120)
        script.wait_for(r"rank 1: epoch \d+, batch", timeout=120)
        script.send_signal(signal.SIGTERM)
        resumed = script.finish(120)
    last_epoch, last_batch = seen[-1]
    expected = (last_epoch, last_batch + 1) if last_batch < 31 else (last_epoch + 1, 0)
    assert batches(resumed.stdout, 0)[0] == batches(resumed.stdout, 1)[0] == expected
