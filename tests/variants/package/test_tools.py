"""The tools of the repository: pictures of terminals, a benchmark that simulates memory, stages of the GPU's run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import run_script

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = r"""
import json, sys
from pathlib import Path
from benchmarks import pictures
from benchmarks.bench_batch_size import Clocked, finder
from benchmarks.terminal import run_in_terminal

folder = Path(sys.argv[1]).resolve()
job = "import os, sys; print('away'); print('\x1b[A\x1b[2K\x1b[31m' + 'x' * 90); print(sys.prefix, os.getcwd())"
shown = run_in_terminal([sys.executable, "-c", job], folder=folder, limit=60)
job = "import pathlib, time; print('begun', flush=True); pathlib.Path('begun').touch(); time.sleep(600)"
hung = run_in_terminal([sys.executable, "-c", job], folder=folder, limit=0.1, since=folder / "begun")
found = {}
finder(found, "model", lambda: Clocked("model"), read=True)()
told = {
    "code": shown.returncode,
    "picture": pictures.draw(pictures.last_rows(shown, 3), "a title", "one"),
    "hung": [hung.lines[0], hung.returncode, hung.obeyed],
    "searched": str(found["model"]),
}
(folder / "told.json").write_text(json.dumps(told))
sys.argv = ["pictures", "costs", "--to", str(folder / "to")]
(folder / "to").mkdir()
pictures.main()
sys.argv[1] = "nothing"
pictures.main()
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tools")
    done = run_script([sys.executable, "-c", PROGRAM, folder], cwd=ROOT, timeout=240)
    assert (folder / "told.json").exists(), done.output
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return {**found, "folder": folder, "end": (done.returncode, done.stderr)}


def test_a_screen_has_what_a_terminal_shows_without_paths_of_this_machine(told: dict[str, Any]) -> None:
    parts = [part for part in ElementTree.fromstring(told["picture"]).iter() if part.tag.endswith("text")]
    rows = ["".join(part.itertext()).replace("\N{NO-BREAK SPACE}", " ") for part in parts]
    rows = [row for row in rows if row.strip()]
    assert told["code"] == 0
    assert rows == ["a title", "x" * 80, "x" * 10, "/home/me/env /home/me/project"]
    assert "url(http" not in told["picture"]


def test_a_job_that_hangs_is_ended_after_the_limit_which_counts_from_a_file(told: dict[str, Any]) -> None:
    assert told["hung"] == ["begun", None, True]


def test_pictures_are_made_by_name_and_another_name_is_refused(told: dict[str, Any]) -> None:
    made = told["folder"] / "to"
    assert [path.name for path in made.iterdir()] == ["costs.png"]
    assert (made / "costs.png").read_bytes().startswith(b"\x89PNG")
    code, said = told["end"]
    assert code == 2 and "invalid choice: 'nothing'" in said


def test_the_benchmark_of_batch_sizes_searches_by_the_memory_that_it_simulates(told: dict[str, Any]) -> None:
    assert "of the wall" in told["searched"]


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
    assert re.fullmatch(r"stage 1 of 2, numbers: \d+ passed in \d+ s\n", capsys.readouterr().out)
    ends_at = time.monotonic() + 5
    code = run.command([sys.executable, "-c", "import time; print('begun'); time.sleep(300)"], log, ends_at)
    assert code and run.how(code, ends_at) == " (cut off at its limit)"
    assert "begun" in log.read_text()
    assert run.how(run.command(["never", "begun"], log, ends_at), ends_at) == " (not begun)"
    assert {path.name for path in tmp_path.iterdir()} == {
        "summary.txt", "junit.xml", "stage-1.log", "stage-2.log"
    }  # fmt: skip
