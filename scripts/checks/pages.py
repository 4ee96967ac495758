"""Pages name files, modules and public names that are there; `docs/architecture.md` names each file of the package."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from repository import PACKAGE, PAGES, ROOT, at, trees

from lightning_lockstep._text import PACKAGE as PIP_NAME

# A path in backquotes, or a link to a file of this repository, with an anchor or without.
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`|\]\(((?!https?:|#)[^)#\s]+)(?:#[^)]*)?\)")
# A module or a name of this package with its whole path. `X` stands for any name, `doctor_checks` for entry points.
DOTTED = re.compile(r"\blightning_lockstep((?:\.(?!X\b|doctor_checks\b)\w+)+)")
# What a path in backquotes begins with if it is one of ours.
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
FOLDERS |= {
    "tests",
    "docs",
    "examples",
    "benchmarks",
    "scripts",
    "side_channel",
    "failure",
    "lightning_lockstep",
}
OF_A_RUN = (".log", ".txt", ".csv", ".json")
FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n.*?^\1```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "yaml", "toml", "text", "json"}
ARCHITECTURE = ROOT / "docs" / "architecture.md"
# What pip, uv or another installer is given, up to the end of the line or of the quoted code.
INSTALLED = re.compile(r"\b(?:pip3?|uv|pipx|poetry|pdm)(?: [\w-]+)*? (?:install|add) +([^\n`#]+)")


def problems() -> Iterator[str]:
    for page in PAGES:
        text = page.read_text()
        for quoted, link in NAMED.findall(text):
            ours = quoted.split("/")[0] in FOLDERS and not quoted.endswith(OF_A_RUN)
            places = (page.parent, ROOT, PACKAGE, PACKAGE / "distributed")
            if (link or ours) and not any((place / (link or quoted)).exists() for place in places):
                yield f"{at(page, link or quoted)}: names {link or quoted}, which is not there"
        for path in DOTTED.findall(text):
            if not is_there(path[1:]):
                yield f"{at(page, path)}: names lightning_lockstep{path}, which is not there"
        # What stands on a page for users is public: the package or its room names it.
        for dotted in (
            sorted(set(re.findall(r"\blightning_lockstep\.\w+\.[\w.]*\w", text))) if "docs" in page.parts else ()
        ):
            module, _, name = dotted.rpartition(".")
            if name != "X" and name not in getattr(importlib.import_module(module), "__all__", ()):
                yield f"{at(page, dotted)}: names {dotted}, which is private: it is not in __all__ of {module}"
        for fence in FENCE.finditer(text):
            if fence[2] not in LANGUAGES:
                line, language = text[: fence.start()].count("\n") + 1, fence[2] or "no language"
                yield f"{at(page, line)}: a block of {language}; expected one of {', '.join(sorted(LANGUAGES))}"
        for indented in re.findall(r"(?:^|\n)(?![ \t]*[-*\d])\S[^\n]*\n\n    (\S.*)", FENCE.sub("", text)):
            yield f"{at(page, indented)}: code that is only indented; put ``` and a language around it"
    sources = (file for folder in (PACKAGE, ROOT / "examples") for file in folder.rglob("*.*"))
    told = (file for file in sources if file.suffix in (".py", ".yaml", ".ipynb", ".sh"))
    for file in (*PAGES, ROOT / "CHANGELOG.md", *sorted(told)):
        yield from installed_by_another_name(file, file.read_text())
    yield from rooms()


def installed_by_another_name(path: Path, text: str) -> Iterator[str]:
    for given in INSTALLED.findall(text):
        for word in given.split():
            name = re.split(r"[\[=<>~!@;]", word.strip("\"'()"))[0].rstrip(",:/")
            name = name if name == "." else re.sub(r"[-_.]+", "-", name.rstrip(".")).lower()
            if name in (".", "lightning-lockstep") and name != PIP_NAME:
                yield f"{at(path, given)}: installs {word}; PACKAGE of _text.py says {PIP_NAME}"


def is_there(path: str) -> bool:
    """Whether there is such a module, or one whose text has the name."""
    *folders, last = path.split(".")
    module = PACKAGE.joinpath(*folders)
    if (module / last).is_dir() or (module / f"{last}.py").is_file():
        return True
    sources = (module / "__init__.pyi", module / "__init__.py", module.with_suffix(".py"))
    return any(re.search(rf"\b{last}\b", source.read_text()) for source in sources if source.is_file())


def rooms() -> Iterator[str]:
    """The table of rooms has a row for each folder, in which each of its files is named, and names no other."""
    text = ARCHITECTURE.read_text()
    table = text[text.index("| subpackage | files |") : text.index("Who may import whom")]
    cells = re.findall(r"^\| (.*?) \| (.*) \|$", table, re.MULTILINE)
    rows = {name: files for first, files in cells for name in re.findall(r"`([^`]+)`", first)}
    for path in trees():
        folder, row = path.parent.relative_to(PACKAGE), rows.get(f"{path.parent.relative_to(PACKAGE)}/")
        if folder == Path():
            if path.name not in rows and path.name != "__init__.py":
                yield f"{at(ARCHITECTURE, '| subpackage')}: the table of rooms has no {path.name}"
        elif row is None:
            yield f"{at(ARCHITECTURE, '| subpackage')}: the table of rooms has no {folder}/"
        elif f"`{path.stem}`" not in row and "by its name" not in row and not path.name.startswith("__"):
            yield f"{at(ARCHITECTURE, f'| `{folder}/`')}: the row of {folder}/ does not name {path.stem}"
    # A row may have several folders in its first column; a file of any of them may be named.
    anywhere = [path for path in PACKAGE.iterdir() if path.is_dir()]
    for folder, files in rows.items():
        if not (PACKAGE / folder).exists():
            yield f"{at(ARCHITECTURE, f'`{folder}`')}: {folder} is not there"
        for name in re.findall(r"`([a-z]\w*|_\w+)`", files) if (PACKAGE / folder).is_dir() else ():
            if name.islower() and not any((place / f"{name}.py").is_file() for place in (PACKAGE / folder, *anywhere)):
                yield f"{at(ARCHITECTURE, f'`{folder}`')}: the row of {folder} names {name}, which is not there"
