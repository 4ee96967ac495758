"""`scripts/setup` says what is missing where there is no Python that fits; with fake ones and nothing else on PATH."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, at

SETUP = ROOT / "scripts" / "setup"
TOOLS = ("bash", "dirname", "mkdir", "cat", "flock", "env", "rm", "ls")
#: What stands behind `scripts/setup`, `PYTHON`, what the fake Python does, the exit code, and what is said.
CASES = [
    ([], "", "", 1, ["needs Python 3.10 to 3.13", "PYTHON=/path/to/python"]),
    (
        [],
        "",
        '[ "$1" = --version ] && echo "Python 3.9.2" && exit 0; exit 1',
        1,
        ["python3 here is: Python 3.9.2"],
    ),
    ([], "python3", "exit 1", 1, ["python3 is not a Python 3.10 to 3.13"]),
    ([], "", 'case "$2" in *ensurepip*) exit 1 ;; esac; exit 0', 1, ["apt install python3-venv"]),
    (["everything"], "", "", 2, ["usage: scripts/setup [run|"]),
]


def problems() -> Iterator[str]:
    for arguments, chosen, body, code, said in CASES:
        with tempfile.TemporaryDirectory() as folder:
            project, bin = Path(folder), Path(folder) / "bin"
            bin.mkdir()
            (project / "scripts").mkdir()
            for name in ("scripts/setup", "pyproject.toml", "constraints.txt"):
                shutil.copy(ROOT / name, project / name)
            for tool in filter(shutil.which, TOOLS):
                (bin / tool).symlink_to(str(shutil.which(tool)))
            if body:
                (bin / "python3").write_text(f"#!/bin/sh\n{body}\n")
                (bin / "python3").chmod(0o755)
            environment = {"PATH": str(bin), "CI": "true"} | ({"PYTHON": f"{bin}/{chosen}"} if chosen else {})
            done = subprocess.run(
                [project / "scripts" / "setup", *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
            )
        if done.returncode != code or not all(text in done.stderr for text in said):
            case = f"setup {' '.join(arguments)}, with a Python that does: {body or 'nothing'}"
            yield f"{at(SETUP)}: {case}: expected exit code {code} and {said}; got {done.returncode} and {done.stderr}"
    for script in ("setup", "check", "test", "demo", "docs", "pictures", "soak", "same_numbers", "gpu"):
        if not os.access(ROOT / "scripts" / script, os.X_OK):
            yield f"{at(ROOT / 'scripts' / script)}: cannot be run; chmod +x"
