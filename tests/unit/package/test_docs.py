"""Pages name files, modules and names that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_lockstep

ROOT = Path(__file__).parents[3]
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
    sources = [
        place
        for place in (module / "__init__.pyi", module / "__init__.py", module.with_suffix(".py"))
        if place.is_file()
    ]
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


def rows_of(page: str) -> dict[str, str]:
    """The rows of the table of rooms, by the names in their first column."""
    table = page[page.index("| subpackage | files |") : page.index("Who may import whom")]
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE)
    return {name: text for first, text in rows for name in re.findall(r"`([^`]+)`", first)}


def unnamed(rows: dict[str, str], package: Path) -> list[str]:
    """Files of the package that the row of their folder does not name, and folders without a row."""
    missing = []
    for path in sorted(package.rglob("*.py")):
        folder, name = path.parent.relative_to(package), path.name
        if folder == Path("."):
            missing += [] if name in rows or name == "__init__.py" else [name]
        elif (row := rows.get(f"{folder}/")) is None:
            missing.append(f"{folder}/")
        elif not (f"`{path.stem}`" in row or "by its name" in row or name.startswith("__")):
            missing.append(f"{folder}/{name}")
    return missing


def test_the_architecture_names_each_folder_and_file() -> None:
    rows = rows_of((ROOT / "docs" / "architecture.md").read_text())
    assert unnamed(rows, PACKAGE) == []
    gone = [name for name in rows if not (PACKAGE / name).exists()]
    named = [
        (folder, name)
        for folder, text in rows.items()
        for name in re.findall(r"`(\w+)`", text)
        if folder.endswith("/") and (PACKAGE / folder).is_dir()
    ]
    gone += [
        f"{folder}{name}"
        for folder, name in named
        if name.islower() and not any((place / f"{name}.py").is_file() for place in places(folder))
    ]
    assert gone == []


def places(folder: str) -> list[Path]:
    """A row may have several folders in its first column; a file of any of them may be named."""
    return [PACKAGE / folder, *(path for path in PACKAGE.iterdir() if path.is_dir())]


def test_a_file_that_the_architecture_does_not_name_is_found(tmp_path: Path) -> None:
    for name in ("room/named.py", "room/__init__.py", "room/other.py", "gone/file.py", "_top.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert unnamed({"room/": "`named`"}, tmp_path) == ["_top.py", "gone/", "room/other.py"]
