"""Pages name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_lockstep

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# A path in backquotes, or a link to a file of this repository, with an anchor or without.
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`|\]\(((?!https?:|#)[^)#\s]+)(?:#[^)]*)?\)")
ROOMS = {path.name for path in Path(lightning_lockstep.__file__).parent.iterdir() if path.is_dir()}
# Folders of rooms that architecture.md names without their room, and of the repository.
HERE = ROOMS | {
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "scripts",
    "side_channel",
    "failure",
    "lightning_lockstep",
}


def named_in(text: str) -> list[str]:
    """Paths that a page names: links always, what stands in backquotes where it begins with a folder of ours.

    What a run writes is left out.
    """
    found = []
    for quoted, link in NAMED.findall(text):
        if link or (quoted.split("/")[0] in HERE and not quoted.endswith((".log", ".txt", ".csv", ".json"))):
            found.append(link or quoted)
    return found


def missing_of(page: Path) -> list[str]:
    package = Path(lightning_lockstep.__file__).parent
    places = [page.parent, ROOT, package, package / "distributed"]
    return [
        name for name in named_in(page.read_text()) if not any((place / name).exists() for place in places)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert missing_of(page) == []


def test_a_file_that_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`steps/isolated.py`, `steps/gone.py`, [a page](other.md#part), `out/of/us.py`, [web](https://x.y)"
    )
    assert missing_of(page) == ["steps/gone.py", "other.md"]


def test_every_folder_of_the_package_has_its_line_in_the_architecture() -> None:
    package = Path(lightning_lockstep.__file__).parent
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| room | holds |") : page.index("Who may import whom")]
    folders = {path.parent.relative_to(package) for path in package.rglob("__init__.py")} - {Path(".")}
    assert [
        str(folder)
        for folder in sorted(folders)
        if f"`{folder.name}/`" not in table.replace(str(folder), folder.name)
    ] == []
