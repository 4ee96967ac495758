"""The example notebook: executed in a real kernel, it shows what its file shows."""

from __future__ import annotations

import base64
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

pytestmark = [pytest.mark.allow_leaks("threads")]

EXAMPLE = Path(__file__).parents[3] / "examples" / "notebook.ipynb"
PNG = b"\x89PNG\r\n\x1a\n"
# What differs between two machines, or two runs.
VARIES = re.compile(r"host \S+, process \d+")


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    book = nbformat.read(EXAMPLE, as_version=4)
    client = NotebookClient(book, timeout=120, record_timing=False, resources={"metadata": {"path": tmp_path}})
    manager = client.create_kernel_manager()
    manager._kernel_spec = KernelSpec(
        argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], language="python"
    )
    yield client.execute()


def shown(book: Any) -> list[list[str]]:
    """What each cell shows, a line each; of pictures and tables only that they are there."""
    cells = []
    for cell in book.cells:
        outputs = cell.get("outputs", ())
        streams = [one.text for one in outputs if one.output_type == "stream" and one.name == "stdout"]
        lines = "".join(streams).splitlines()
        for output in outputs:
            if output.output_type == "error":
                lines += VARIES.sub("host and process", "\n".join(output.traceback)).splitlines()
            elif output.output_type == "display_data":
                lines += sorted(output.data)
        cells.append(lines)
    return cells


def test_the_example_shows_what_its_file_shows(executed: Any) -> None:
    written = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(written)
    assert shown(executed) == shown(written)
    text = "\n".join(line for cell in shown(executed) for line in cell)
    assert "87 steps, the last loss is below 0.5: True" in text
    assert "RankFailedError: rank 1 of 2 (host and process) was killed by SIGKILL" in text
    assert "the weights have come back: True" in text
    pictures = [
        base64.b64decode(output.data["image/png"])
        for cell in executed.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 1 and pictures[0].startswith(PNG) and len(pictures[0]) > 10_000
