"""Every test here runs in an empty folder: `lockstep-train` looks at the runs beside it."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the repository, where the demo may have left runs in `outputs/`; nor the test's own folder."""
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))
