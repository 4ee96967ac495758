"""The command as users call it: a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_lockstep
from lightning_lockstep.doctor import command
from lightning_lockstep.doctor.command import main
from lightning_lockstep.doctor.registry import Status
from tests.harness.patience import wait_until
from tests.models.doctor.imitated_machine import read_machine
from tests.models.doctor.machines import FOLDER

OLD_KERNEL, HANGING_KERNEL = FOLDER / "kernel_old_ubuntu.yaml", FOLDER / "kernel_old_and_hangs.yaml"


def doctor(*arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_lockstep.doctor", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **more)


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the command in this process as if on an imitated machine; return its exit code and what it prints."""

    def run(path: Path, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(command, "Machine", lambda: read_machine(path))
        given, names, options = command.read(arguments)
        least = Status(given.only) if given.only else Status.NOT_APPLICABLE
        # Not `main`, after which this process could start no more programs.
        code = command.run_checks(names, options, least, as_json=given.json, strict=given.strict)
        return code, capsys.readouterr().out

    return run


def test_rows_lines_to_paste_and_exit_code(on_machine: Callable[..., tuple[int, str]]) -> None:
    code, printed = on_machine(HANGING_KERNEL, "kernel")
    assert code == 1, printed
    assert "Linux kernel" in printed and "did not end within 10 s" in printed
    assert "\n# upgrade the kernel to 5.5 or newer (uname -r shows it), and reboot\n" in printed
    assert "1 check in" in printed and "1 problem" in printed


def test_warnings_count_only_when_strict(on_machine: Callable[..., tuple[int, str]]) -> None:
    assert on_machine(OLD_KERNEL, "kernel")[0] == 0
    assert on_machine(OLD_KERNEL, "kernel", "--strict")[0] == 3


def test_json_is_all_that_is_printed() -> None:
    done = doctor("kernel", "packages", "--json")
    report = json.loads(done.stdout)
    assert [check["check"] for check in report["checks"]] == ["packages", "kernel"]
    assert report["status"] in ("ok", "warning", "problem") and done.stderr == ""


def test_only_rows_of_a_status_are_shown(on_machine: Callable[..., tuple[int, str]]) -> None:
    _, printed = on_machine(OLD_KERNEL, "kernel", "--only", "problem")
    assert "5.4.0" not in printed and "looked at" not in printed and "1 warning" in printed


def test_an_unknown_check_is_refused() -> None:
    done = doctor("kernal")
    assert done.returncode == 2
    assert "check 'kernal': expected one of" in done.stderr and "Did you mean 'kernel'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mpi", "--hostfile", "options"], "'-oProxyCommand=x' is not the name of a host"),
        (["mpi", "--hostfile", "absent"], "hostfile absent: it cannot be read"),
        (["kernel", "--hostfile", "hosts"], "--hostfile is for the check mpi"),
    ],
)
def test_hosts_that_cannot_be_used_are_refused(
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a\n")
    Path("options").write_text("a\n-oProxyCommand=x\n")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_without_an_environment() -> None:
    """As in a prolog of Slurm."""
    folder = str(Path(sys.executable).resolve().parent)
    package = str(Path(__file__).resolve().parents[3])
    done = doctor("kernel", env={"PATH": folder, "PYTHONPATH": package}, cwd="/")
    assert done.returncode in (0, 1) and "Linux kernel" in done.stdout, done.stderr


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "its time is over"])
def test_no_program_outlives_the_doctor(how: str, tmp_path: Path) -> None:
    pid, program = tmp_path / "pid", tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho $$ > {pid}.part; mv {pid}.part {pid}; exec sleep 600\n")
    program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "lightning_lockstep.doctor", "cuda"]
    command += ["--timeout", "2"] if how == "its time is over" else []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert wait_until(pid.exists, 60)
    if how != "its time is over":
        process.send_signal(signal.Signals[how])
    told = process.communicate(timeout=60)[0]
    assert process.returncode == {"SIGTERM": 143, "SIGINT": 130}.get(how, 1), told
    assert "Traceback" not in told
    child = Path("/proc", pid.read_text().strip(), "cmdline")
    assert wait_until(lambda: not child.exists() or child.read_bytes() == b"", 60)


HEAVY = ["torch", "lightning", "deepspeed", "mpi4py", "pytorch_lightning"]


def test_the_doctor_imports_no_engine(tmp_path: Path) -> None:
    program = tmp_path / "lockstep-doctor"  # the name of the console script
    program.write_text(
        "import sys, importlib\n"
        "for module in ('command', 'checks.packages'):\n"
        "    importlib.import_module(f'lightning_lockstep.doctor.{module}')\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_version_and_a_help_that_breaks_no_word() -> None:
    assert doctor("--version").stdout == f"lightning-lockstep {lightning_lockstep.__version__}\n"
    lines = doctor("--help", env={**os.environ, "COLUMNS": "80"}).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("network" in line and "gloo" in line for line in lines)
