"""`--install-completion`: what bash completes afterwards, in a real bash."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers import run_script

ASK = """
source "$HOME/.bashrc"
for typed in "strategy=d" "trainer.max_e" "callbacks=stop"; do
    COMP_LINE="lockstep-train $typed" COMP_POINT=99 COMP_CWORD=1
    hydra_bash_completion
    echo "$typed: ${COMPREPLY[@]}"
done
"""


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """The command as pip installs it."""
    path = tmp_path / "bin" / "lockstep-train"
    path.parent.mkdir()
    path.write_text(f"#!{sys.executable}\nfrom lightning_lockstep.train import main\nmain()\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_groups_options_and_keys(command: Path, tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("# mine\n")
    paths = f"{command.parent}:/usr/bin:/bin"
    env = {"HOME": str(tmp_path), "SHELL": "/bin/bash", "PATH": paths}
    for _ in range(2):
        outcome = run_script([command, "--install-completion"], env=env, fresh=True)
        assert outcome.returncode == 0, outcome.output
        assert "a new shell has it" in outcome.stdout
    script = tmp_path / ".bash_completions" / "lockstep-train.sh"
    assert (tmp_path / ".bashrc").read_text() == f"# mine\n\nsource '{script}'\n"
    answers = run_script(["bash", "--norc", "-c", ASK], env=env, fresh=True)
    found = dict(line.split(":") for line in answers.stdout.splitlines())
    assert {"strategy=ddp", "strategy=deepspeed_stage_3"} <= set(found["strategy=d"].split())
    assert found["trainer.max_e"].split() == ["trainer.max_epochs="]
    assert found["callbacks=stop"].split() == ["callbacks=stop_together"]


def test_another_shell_is_told_where_to_look(command: Path, tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path), "SHELL": "/usr/bin/fish"}
    outcome = run_script([command, "--install-completion"], env=env, fresh=True)
    assert outcome.returncode == 2
    assert "expected bash as $SHELL" in outcome.stderr
    assert not (tmp_path / ".bashrc").exists()
