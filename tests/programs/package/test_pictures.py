"""Pictures are made from real output, and the costs in the README from measured figures."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PICTURES = ROOT / "docs" / "pictures"

PROGRAM = """
import sys
from pathlib import Path
from benchmarks.pictures import draw, last_rows
from benchmarks.terminal import run_in_terminal

job = "import os, sys; print('away'); print('\\x1b[A\\x1b[2K\\x1b[31m' + 'x' * 90); print(sys.prefix, os.getcwd())"
shown = run_in_terminal([sys.executable, "-c", job], folder=Path(sys.argv[1]).resolve(), limit=60)
assert shown.returncode == 0, shown
print(draw(last_rows(shown, 3), "a title", "one"))
"""


def test_a_screen_has_what_a_terminal_shows_without_paths_of_this_machine(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    parts = [part for part in ElementTree.fromstring(done.stdout).iter() if part.tag.endswith("text")]
    rows = ["".join(part.itertext()).replace("\N{NO-BREAK SPACE}", " ") for part in parts]
    rows = [row for row in rows if row.strip()]
    assert rows == ["a title", "x" * 80, "x" * 10, "/home/me/env /home/me/project"]
    assert "url(http" not in done.stdout


HANGING = """
import sys
from pathlib import Path
from benchmarks.terminal import run_in_terminal

folder = Path(sys.argv[1])
job = "import pathlib, time; print('begun', flush=True); pathlib.Path('begun').touch(); time.sleep(600)"
shown = run_in_terminal([sys.executable, "-c", job], folder=folder, limit=0.1, since=folder / "begun")
print(shown.lines[0], shown.returncode, shown.obeyed)
"""


def test_a_job_that_hangs_is_ended_after_the_limit_which_counts_from_a_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "begun None True\n", done.stderr


def test_pictures_are_made_by_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.pictures", "costs", "--to", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["costs.png"]


def test_a_name_that_is_no_picture_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks.pictures", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


def test_the_costs_in_the_readme_are_those_of_the_results() -> None:
    program = "from benchmarks.costs import COSTS, line\nfor cost in COSTS: print(line(cost))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    rows = done.stdout.splitlines()
    assert rows, done.stderr
    readme = (ROOT / "README.md").read_text().splitlines()
    assert [row for row in rows if row not in readme] == []


def test_the_pictures_that_are_kept_show_no_other_machine_and_load_nothing() -> None:
    screens = sorted(PICTURES.glob("*.svg"))
    shown = re.findall(r'src="(.*?)"', (ROOT / "README.md").read_text())
    assert [ROOT / path for path in shown if ROOT / path not in screens] == []
    assert screens and shown
    for screen in screens:
        text = screen.read_text()
        assert not re.search(r"url\(['\"]?http|<image|@import", text), screen
        assert not re.search(r"/(?:tmp|work|root)/", text), screen
