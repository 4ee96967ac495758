"""What visitors of the repository get: how to cite it, and forms for issues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_lockstep

ROOT = Path(__file__).parents[3]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == lightning_lockstep.__version__
    assert f'license = "{citation["license"]}"' in (ROOT / "pyproject.toml").read_text()


def test_there_are_forms() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_accepts_and_asks_for_the_doctor(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    for part in form["body"]:
        assert part["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert "value" in part["attributes"] if part["type"] == "markdown" else part["attributes"]["label"]
    ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(ids) == len(set(ids))
    asked = [part["attributes"]["label"] for part in form["body"] if part.get("id") == "doctor"]
    assert len(asked) == 1 and "lockstep-doctor --json" in asked[0]
