"""The scripts where the machine is not as they need it, and the docstring check."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what scripts/setup reads, with no network and no packages behind it."""
    (tmp_path / "bin").mkdir()
    for name in ("scripts", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path


def fake_python(project: Path, name: str, body: str) -> None:
    path = project / "bin" / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def setup(
    project: Path, *args: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[str]:
    # Only the tools that the script itself uses are on this PATH, and no Python but the fake ones.
    for tool in ("bash", "dirname", "mkdir", "cat", "flock", "env", "rm", "ls"):
        found = shutil.which(tool)
        target = project / "bin" / tool
        if found and not target.exists():
            target.symlink_to(found)
    return subprocess.run(
        [project / "scripts" / "setup", *args],
        env={"PATH": str(project / "bin"), "CI": "true", **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


def test_no_python_at_all(project: Path) -> None:
    done = setup(project)
    assert done.returncode == 1
    assert "needs Python 3.10 to 3.13" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr


def test_a_python_that_is_too_old(project: Path) -> None:
    fake_python(project, "python3", '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0; exit 1')
    done = setup(project)
    assert done.returncode == 1
    assert "python3 here is: Python 3.9.2" in done.stderr


def test_a_chosen_python_that_does_not_fit(project: Path) -> None:
    fake_python(project, "old", "exit 1")
    done = setup(project, PYTHON=str(project / "bin" / "old"))
    assert done.returncode == 1
    assert "old is not a Python 3.10 to 3.13" in done.stderr


def test_a_python_without_venv(project: Path) -> None:
    fake_python(project, "python3", 'case "$2" in *ensurepip*) exit 1 ;; esac; exit 0')
    done = setup(project)
    assert done.returncode == 1
    assert "cannot make virtual environments" in done.stderr
    assert "apt install python3-venv" in done.stderr


def test_an_unknown_argument(project: Path) -> None:
    done = setup(project, "everything")
    assert done.returncode == 2
    assert "usage: scripts/setup [run|dev|xla]" in done.stderr


def check_docstrings(project: Path, module: str, private: str = "") -> subprocess.CompletedProcess[str]:
    package = project / "lightning_lockstep"
    package.mkdir()
    (package / "__init__.pyi").write_text("from lightning_lockstep.module import thing\n")
    (package / "__init__.py").touch()
    (package / "module.py").write_text(module)
    (package / "_private.py").write_text(private)
    script = project / "scripts" / "check_docstrings.py"
    return subprocess.run(
        [shutil.which("python3") or "python3", script], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("def thing(a):\n    pass\n", "no docstring"),
        ('def thing(a):\n    """Do.\n\n    Args:\n        a: It.\n    """\n', "no 'Ranks:' line"),
        ('def thing(a):\n    """Do.\n\n    Ranks: any; sends nothing.\n    """\n', "no 'Args:'"),
        ("other = 1\n", "no class or function of that name"),
    ],
)
def test_the_docstring_check_finds(project: Path, module: str, fault: str) -> None:
    done = check_docstrings(project, module)
    assert done.returncode == 1
    assert fault in done.stdout


def test_the_docstring_check_passes_a_whole_docstring(project: Path) -> None:
    text = (
        'def thing(a):\n    """Do.\n\n    Args:\n        a: It.\n\n    Ranks: any; sends nothing.\n    """\n'
    )
    done = check_docstrings(project, text)
    assert done.returncode == 0
    assert "1 public names, 0 faults" in done.stdout


WHOLE = 'def thing(a):\n    """Do.\n\n    Args:\n        a: It.\n\n    Ranks: any; sends nothing.\n    """\n'
SECTION = '    """Do.\n\n    Returns:\n        It.\n    """\n'


@pytest.mark.parametrize(
    ("private", "name"),
    [
        (f"def _part(a):\n{SECTION}", "_part"),
        (f"class _Part:\n    def go(self):\n    {SECTION}", "_Part.go"),
        (f"def _whole():\n    def inner():\n    {SECTION}", "_whole._.inner"),
    ],
)
def test_a_section_of_a_private_name_is_found(project: Path, private: str, name: str) -> None:
    done = check_docstrings(project, WHOLE, private)
    assert done.returncode == 1
    assert f" {name}: a private name has a section in its docstring" in done.stdout


PIP_THAT_NOTES = r"""
case "$1 $2" in
    "- "*) echo fingerprint ;;
    "-m venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip") echo "$*" >>pip.log ;;
    "-m hatchling") mkdir -p .cache/wheel && : >.cache/wheel/a.whl ;;
esac
exit 0"""


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_pip_shows_its_progress_on_a_terminal_only(project: Path, on_a_terminal: bool) -> None:
    fake_python(project, "python3", PIP_THAT_NOTES)
    (project / "bin" / "cp").symlink_to(shutil.which("cp") or "cp")
    (project / "lightning_lockstep").mkdir()
    try:
        outside, inside = pty.openpty()
    except OSError as error:  # in a chroot without /dev/pts
        pytest.skip(f"no pseudo-terminals here: {error}")
    try:
        done = setup(project, "run", stdout=inside if on_a_terminal else subprocess.PIPE)
    finally:
        os.close(outside)
        os.close(inside)
    assert done.returncode == 0, done.stderr
    calls = (project / "pip.log").read_text().splitlines()
    assert len(calls) == 3
    assert all((" -qq " in call) is not on_a_terminal for call in calls)


FAILING = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no such thing")

def test_passes():
    pass

@pytest.mark.parametrize("size", [2])
def test_compares(size):
    assert size == 3, "too small: " + "x" * 1000

def test_needs(broken):
    pass
"""


def test_what_failed_is_listed_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(FAILING)
    report = tmp_path / "report.xml"
    quiet = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run(
        [sys.executable, *quiet, f"--junitxml={report}", "test_some.py"],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    listed = subprocess.run(
        [sys.executable, ROOT / "scripts" / "failures.py", report, tmp_path / "absent.xml"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert listed[0].startswith("FAILURE test_some::test_compares[2]: AssertionError: too small: xxx")
    assert listed[0].endswith("xxx ...")
    assert listed[1].startswith("ERROR test_some::test_needs: ")
    assert "OSError: no such thing" in listed[1]
    assert listed[2:] == [f"no report {tmp_path / 'absent.xml'}: pytest did not come to its end"]


def test_a_stage_of_the_gpu_run_says_how_it_ended_and_one_cut_off_keeps_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("gpu_stages", ROOT / "scripts" / "gpu_stages.py")
    assert spec is not None and spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_stages", gpu)  # where its dataclass looks for itself
    spec.loader.exec_module(gpu)
    found = gpu.Stage("numbers", 100, ("tests/unit/replicas/test_checksums.py",))
    monkeypatch.setattr(gpu, "STAGES", [found, gpu.Stage("hangs", 100)])
    run, log = gpu.Run("cpu", tmp_path, slow=1.0), tmp_path / "stage-2.log"
    run.stage(1)
    assert re.fullmatch(r"stage 1 of 2, numbers: 10 passed in \d+ s\n", capsys.readouterr().out)
    ends_at = time.monotonic() + 5
    code = run.command([sys.executable, "-c", "import time; print('begun'); time.sleep(300)"], log, ends_at)
    assert code and run.how(code, ends_at) == " (cut off at its limit)"
    assert "begun" in log.read_text()
    assert run.how(run.command(["never", "begun"], log, ends_at), ends_at) == " (not begun)"
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.txt", "junit.xml", "stage-1.log", "stage-2.log"
    }  # fmt: skip
