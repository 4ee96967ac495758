"""Pages name files, modules and names that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_lockstep

ROOT = Path(__file__).parents[2]
PACKAGE = Path(lightning_lockstep.__file__).parent
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
# A path in backquotes, or a link to a file of this repository, with an anchor or without.
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`|\]\(((?!https?:|#)[^)#\s]+)(?:#[^)]*)?\)")
# A module or a name of this package with its whole path. `X` stands for any name, `doctor_checks` for entry points.
DOTTED = re.compile(r"\blightning_lockstep((?:\.(?!X\b|doctor_checks\b)\w+)+)")
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
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
    places = [page.parent, ROOT, PACKAGE, PACKAGE / "distributed"]
    text = page.read_text()
    return [
        *(name for name in named_in(text) if not any((place / name).exists() for place in places)),
        *(f"lightning_lockstep{path}" for path in DOTTED.findall(text) if not is_there(path[1:])),
    ]


def is_there(path: str) -> bool:
    """Whether there is such a module, or one whose text has the name."""
    module = PACKAGE
    *folders, last = path.split(".")
    for part in folders:
        module /= part
    places = [module / last / "__init__.py", module / f"{last}.py"]
    if any(place.is_file() for place in places):
        return True
    sources = [place for place in (module / "__init__.py", module.with_suffix(".py")) if place.is_file()]
    return any(re.search(rf"\b{last}\b", source.read_text()) for source in sources)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    assert missing_of(page) == []


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`steps/isolated.py`, `steps/gone.py`, [a page](other.md#part), `out/of/us.py`, [web](https://x.y), "
        "lightning_lockstep.train, lightning_lockstep.demo.ByteGPT, lightning_lockstep.demo.X, "
        "lightning_lockstep.demo.Gone, lightning_lockstep.gone.ByteGPT"
    )
    assert missing_of(page) == [
        *("steps/gone.py", "other.md"),
        *("lightning_lockstep.demo.Gone", "lightning_lockstep.gone.ByteGPT"),
    ]


def test_every_folder_and_file_at_the_top_has_its_line_in_the_architecture() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("| room | holds |") : page.index("Who may import whom")]
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")} - {Path(".")}
    assert [
        str(folder)
        for folder in sorted(folders)
        if f"`{folder.name}/`" not in table.replace(str(folder), folder.name)
    ] == []
    files = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert [name for name in sorted(files) if f"`{name}`" not in table] == []


# A row of the table of a folder's docstring: `name`, `folder/`, or several with commas.
ROW = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)
HEAD = re.compile(r"^\| (?:file|file or folder|module) \| holds \|$", re.MULTILINE)
TABLED = [path.parent for path in sorted(PACKAGE.rglob("__init__.py")) if HEAD.search(path.read_text())]


def parts_of(folder: Path) -> set[str]:
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    return files | {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}


@pytest.mark.parametrize("folder", TABLED, ids=lambda folder: str(folder.relative_to(PACKAGE)))
def test_the_table_of_a_folder_names_each_of_its_parts(folder: Path) -> None:
    rows = ROW.findall((folder / "__init__.py").read_text())
    named = [
        name.split("/")[0] + "/" * ("/" in name) for row in rows for name in re.findall(r"`([^`]+)`", row)
    ]
    assert set(named) == parts_of(folder)


def test_large_folders_have_a_table() -> None:
    # docs/architecture.md has the rooms themselves; the files of callbacks/ have the names of what they hold.
    exempt = {PACKAGE, PACKAGE / "callbacks"}
    large = {path.parent for path in PACKAGE.rglob("__init__.py") if len(parts_of(path.parent)) > 10}
    assert large - exempt <= set(TABLED)
