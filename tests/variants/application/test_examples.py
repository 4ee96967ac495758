"""The examples run as their first lines say; those that README names: tests/programs/application."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.harness import run_script
from tests.programs.application.test_examples import EXAMPLES, copied, prints


def test_the_plain_trainer(tmp_path: Path) -> None:
    outcome = run_script([EXAMPLES / "plain_trainer.py"], cwd=tmp_path, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert "on 2 ranks" in outcome.stdout
    assert outcome.stdout.count("final train_loss") == 1
    assert list(tmp_path.iterdir()) == []


def test_logging_in_order(tmp_path: Path) -> None:
    outcome = run_script([EXAMPLES / "ordered_logging.py"], cwd=tmp_path, timeout=120)
    assert outcome.returncode == 137, outcome.output
    said = [line for line in outcome.output.splitlines() if "ordered_logging.py:" in line]
    told = [
        "only the main rank",
        "all of us",
        "part is 0",
        "part is 10",
        "part is 20",
        "part is 30",
        "only rank 3",
    ]
    assert [words for line in said for words in told if words in line.replace("my ", "")][:7] == told
    assert "rank 1 did not log this line within 1.0 s" in outcome.output
    assert "rank 2 of 4" in outcome.output
    assert len(list((tmp_path / "ordered_logging").iterdir())) == 4


def test_stopping_together(tmp_path: Path) -> None:
    outcome = run_script([EXAMPLES / "stop_together.py"], cwd=tmp_path, timeout=120)
    assert outcome.returncode == 0, outcome.output
    ends = [line for line in outcome.stdout.splitlines() if line.startswith("rank ")]
    assert len(ends) == 2, outcome.output
    assert {line.partition(": ")[2] for line in ends} == {ends[0].partition(": ")[2]}
    assert "breakpoint: rank 1: the loss looks odd" in ends[0]


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [
        ("data", 1, "ranks 0-1 work on the same batches"),
        ("none", 0, "sum of the weights"),
    ],
)
def test_ranks_out_of_step(way: str, code: int, said: str, tmp_path: Path) -> None:
    outcome = run_script([EXAMPLES / "out_of_step.py", way], cwd=tmp_path, timeout=120)
    assert outcome.returncode == code, outcome.output
    assert said in " ".join(outcome.output.split())


def test_the_research_project(tmp_path: Path) -> None:
    project = copied("research_project", tmp_path)
    outcome = run_script(
        [sys.executable, "train.py", "experiment=wine_two_ranks", "trainer.max_epochs=5"],
        cwd=project,
        timeout=120,
    )
    assert outcome.returncode == 0, outcome.output
    assert "run finished" in outcome.stdout
    assert len(list((project / "outputs" / "train").iterdir())) == 1


def test_the_module_of_the_smallest_hydra_project_without_its_program(tmp_path: Path) -> None:
    command = "-m lightning_lockstep.train --config-dir conf model=net ~data trainer.devices=2 trainer.max_epochs=3"
    project = copied("hydra_project", tmp_path)
    outcome = run_script([sys.executable, *command.split()], cwd=project, timeout=120)
    assert outcome.returncode == 0, outcome.output
    assert "48 in 3 epochs on 2 ranks" in outcome.stdout
    (run,) = (project / "outputs" / "train").iterdir()
    assert (run / "checkpoints" / "last.ckpt").is_file()


# The one with two callbacks is among the default tests.
SHOWN = [
    line
    for line in re.findall(r"^python (.*)\n# (.*)$", (EXAMPLES / "foreign_app" / "README.md").read_text(), re.MULTILINE)
    if "[early_stopping,stop_together]" not in line[0]
]


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_line_of_an_app_that_has_only_our_configs(command: str, printed: str, tmp_path: Path) -> None:
    if "joblib" in command:
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    prints(command, printed, tmp_path)


def test_lightning_cli_refuses_a_value_before_a_rank_starts(tmp_path: Path) -> None:
    folder = copied("lightning_cli", tmp_path)
    given = ["fit", "--config", "digits.yaml", "--trainer.strategy.init_args.uneven_inputs=truncated"]
    outcome = run_script([sys.executable, "train.py", *given], cwd=folder, timeout=120)
    assert outcome.returncode == 2, outcome.output
    assert "Literal['error', 'truncate', 'join']. Got value: truncated" in outcome.stderr
    assert "2 ranks" not in outcome.output


def test_the_largest_batch(tmp_path: Path) -> None:
    options = ["--ranks", "2", "--global-batch-size", "4096", "--memory-limit", "900MiB"]
    outcome = run_script([EXAMPLES / "find_batch_size.py", *options], cwd=tmp_path, timeout=240)
    assert outcome.returncode == 0, outcome.output
    assert outcome.stdout.splitlines()[-1].startswith("trained 3 steps")
    assert "batch size trial 1: " in outcome.output


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        (["--ranks", "2"], "OverflowDetectedError: Detected inf/nan during batch_number=3"),
        (["--fp32", "model.encoder.block.0.layer.1.DenseReluDense"], "All 6 steps passed."),
    ],
)
def test_a_tiny_t5_that_overflows(options: list[str], ending: str, tmp_path: Path) -> None:
    outcome = run_script([EXAMPLES / "overflow_t5.py", *options], cwd=tmp_path, timeout=240)
    assert outcome.returncode == 0, outcome.output
    assert f"\n{ending}" in outcome.stdout


def test_the_same_run_under_several_strategies(tmp_path: Path) -> None:
    options = ["ddp", "fsdp, 2", "--steps", "8", "--model", "cnn"]
    outcome = run_script([EXAMPLES / "same_run" / "compare.py", *options], cwd=tmp_path, timeout=300)
    assert outcome.returncode == 0, outcome.output
    rows = [line.split("|")[1:-1] for line in outcome.stdout.splitlines() if line.startswith("| ")][2:]
    assert [row[0].strip() for row in rows] == ["one process", "ddp, 2 ranks", "fsdp, 2 ranks"]
    assert all(float(row[-1]) < 1e-5 for row in rows), outcome.stdout
    assert (tmp_path / "same-run.png").stat().st_size > 10_000


def test_a_real_model_knows_as_much_on_three_ranks_as_on_one(tmp_path: Path) -> None:
    script = [EXAMPLES / "same_run" / "real_model.py", "--ranks", "1", "3"]
    outcome = run_script(script, cwd=tmp_path, timeout=200)
    assert outcome.returncode == 0, outcome.output
    one, three = re.findall(r"lockstep_ddp on \d: accuracy (\d\.\d+)", outcome.stdout)
    assert one == three and float(one) > 0.5


def test_a_plain_program_on_three_ranks_prints_what_it_prints_on_one(tmp_path: Path) -> None:
    def printed(ranks: int) -> list[str]:
        outcome = run_script([EXAMPLES / "same_run" / "any_ranks.py", "--ranks", str(ranks)], cwd=tmp_path)
        assert outcome.returncode == 0, outcome.output
        return outcome.stdout.splitlines()[-1].split(": ")

    (one, numbers), (three, same) = printed(1), printed(3)
    assert (one, three) == ("lockstep_ddp on 1", "lockstep_ddp on 3")
    assert numbers == same
