"""Each kind of leak is provoked and must be found; the allow-list must excuse exactly what it names."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import LeakCheck


@pytest.fixture
def cleanup() -> Iterator[list[Callable[[], object]]]:
    todo: list[Callable[[], object]] = []
    yield todo
    for action in todo:
        action()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before = LeakCheck.now()
    monkeypatch.setenv("A_LEAKED_VARIABLE", "1")
    assert before.leaks() == ["environment variable A_LEAKED_VARIABLE: None before, '1' after"]
    assert before.leaks(["env:A_LEAKED_VARIABLE"]) == []
    assert before.leaks(["env:ANOTHER"]) != []
    before.restore()
    assert "A_LEAKED_VARIABLE" not in os.environ


def test_thread(cleanup: list[Callable[[], object]]) -> None:
    before = LeakCheck.now()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    thread.start()
    cleanup += [end.set, thread.join]
    assert before.leaks(patience=0.1) == ["thread 'forgotten' is still running"]
    assert before.leaks(["threads"]) == []


def test_process_group(tmp_path: Path) -> None:
    before = LeakCheck.now()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert "torch.distributed is still initialised" in before.leaks()
    before.restore()
    assert not dist.is_initialized()


def test_child_process(cleanup: list[Callable[[], object]]) -> None:
    before = LeakCheck.now()
    child = subprocess.Popen(["sleep", "600"])
    cleanup += [child.kill, child.wait]
    (leak,) = before.leaks(patience=0.1)
    assert f"process {child.pid} is still there" in leak
    assert "sleep 600" in leak


def test_file_and_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = LeakCheck.now()
    (tmp_path / "left.txt").touch()
    other = tmp_path / "elsewhere"
    other.mkdir()
    os.chdir(other)
    assert before.leaks() == [
        f"working folder changed to {other}",
        "file left in the working folder: elsewhere",
        "file left in the working folder: left.txt",
    ]
    before.restore()
    assert Path.cwd() == tmp_path


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"allow_leaks got \['thread'\]"):
        LeakCheck.now().leaks(["thread"])


def test_the_fixture_fails_a_leaking_test(tmp_path: Path) -> None:
    """The autouse fixture itself, in a pytest run of its own."""
    conftest = Path(__file__).parents[2] / "conftest.py"
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "conftest.py").write_text(conftest.read_text())
    (folder / "helpers").symlink_to(conftest.parent / "helpers")
    (folder / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_leaks():\n    os.environ['LEFT'] = '1'\n"
        "@pytest.mark.allow_leaks('env:LEFT')\ndef test_may():\n    os.environ['LEFT'] = '1'\n"
        "def test_is_clean_again():\n    assert 'LEFT' not in os.environ\n"
    )
    ini = tmp_path / "pytest.ini"
    ini.write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = allow_leaks(*kinds)\n")
    done = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider", "-c", ini, folder],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 error" in done.stdout
    assert "3 passed" in done.stdout
    assert "environment variable LEFT: None before, '1' after" in done.stdout
