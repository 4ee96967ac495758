"""Tab completion in real shells, by the lines of docs/hydra.md."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import run_script

#: The lines for each shell, by the comment above them.
PAGE = (Path(__file__).parents[3] / "docs" / "hydra.md").read_text()
BLOCK = PAGE.split("## Tab completion")[1].split("```text\n")[1].split("```")[0]
LINES = dict(part.split("\n", 1) for part in BLOCK.split("\n\n"))
FOUND = {"strategy=ddp", "strategy=deepspeed_stage_3"}
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
def test_bash_completes_by_the_line_of_the_page(command: Path, tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text(LINES["# bash: ~/.bashrc"])
    env = {"HOME": str(tmp_path), "PATH": f"{command.parent}:/usr/bin:/bin"}
    answers = run_script(["bash", "--norc", "-c", ASK], env=env, fresh=True)
    found = dict(line.split(":") for line in answers.stdout.splitlines())
    assert set(found["strategy=d"].split()) >= FOUND, answers.output
    assert found["trainer.max_e"].split() == ["trainer.max_epochs="]
    assert found["callbacks=stop"].split() == ["callbacks=stop_together"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish: apt-get install fish")
def test_fish_completes_by_the_line_of_the_page(command: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.fish").write_text(
        LINES["# fish: ~/.config/fish/config.fish"]
        + """
for typed in strategy=d trainer.max_e callbacks=stop
    echo $typed: (complete -C "lockstep-train $typed")
end
"""
    )
    env = {"HOME": str(tmp_path), "PATH": f"{command.parent}:/usr/bin:/bin"}
    outcome = run_script(["fish", "--no-config", "ask.fish"], cwd=tmp_path, env=env, fresh=True)
    found = dict(line.split(":") for line in outcome.stdout.splitlines())
    assert set(found["strategy=d"].split()) >= FOUND, outcome.output
    assert found["trainer.max_e"].split() == ["trainer.max_epochs="]
    assert found["callbacks=stop"].split() == ["callbacks=stop_together"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh: apt-get install zsh")
def test_zsh_completes_by_the_lines_of_the_page(command: Path, tmp_path: Path) -> None:
    (tmp_path / ".zshrc").write_text(LINES["# zsh: ~/.zshrc"])
    env = {**os.environ, "HOME": str(tmp_path), "ZDOTDIR": str(tmp_path), "TERM": "dumb", "PS1": "> "}
    env["PATH"] = f"{command.parent}:/usr/bin:/bin"
    with terminal(["zsh", "-d", "-i"], env) as (write, until):
        write("print rea''dy\n")  # once .zshrc was read
        until("ready")
        write("lockstep-train trainer.max_e\t")
        until("trainer.max_epochs=")
        write("\x15lockstep-train strategy=d\t\t")
        until("strategy=deepspeed_stage_3_offload_nvme")


@contextmanager
def terminal(command: list[str], env: dict[str, str]) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """A program at a terminal: a function that types, and one that waits until the program has shown a text."""
    master, slave = pty.openpty()
    shown = ""

    def write(text: str) -> None:
        os.write(master, text.encode())

    def until(text: str) -> None:
        nonlocal shown
        end = time.monotonic() + 60
        while text not in shown:
            assert time.monotonic() < end, f"{text!r} is not in {shown!r}"
            if select.select([master], [], [], 1)[0]:
                shown += os.read(master, 65536).decode(errors="replace")
        shown = shown.partition(text)[2]

    with subprocess.Popen(command, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True) as process:
        os.close(slave)
        try:
            yield write, until
        finally:
            process.kill()
    os.close(master)
