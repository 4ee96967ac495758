"""What the site has beside docs/: files of the repository to which a page links, and the configuration keys.

mkdocs loads this file as a hook, mkdocstrings as an extension (see mkdocs.yml). Nothing is imported from the package,
so the site is built without torch.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_lockstep"
sys.path.insert(0, str(ROOT / "scripts"))

from check_docstrings import find  # noqa: E402

LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".ipynb": "python"}
LINK = re.compile(r"""(\]\(|<img src=")(?!\w+:|#|<)([^)#\s"]+)(?=[#)\s"])""")


def options() -> Iterator[tuple[str, str]]:
    """The file of each strategy and callback, and the page of the site with its options."""
    for page in sorted(ROOT.glob("docs/strategies/*.md")) + sorted(ROOT.glob("docs/callbacks/*.md")):
        if found := find(page.stem, page.parent.name):
            yield str(found[1].relative_to(ROOT)), f"{page.parent.name}/{page.name}"


PLACES = {"README.md": "index.md", "docs": "index.md", **dict(options())}


def site_path(file: str) -> str:
    """Where a file of the repository stands in the site."""
    if file in PLACES:
        return PLACES[file]
    if (ROOT / file).is_dir():
        return "examples/index.md"
    return file.removeprefix("docs/") if file.endswith((".md", ".svg", ".png")) else f"{file}.md"


def relink(text: str, file: str) -> str:
    """The text of a file of the repository with its links made to fit the site."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[2]))
        if not (ROOT / target).exists():
            return found[0]  # the strict build names it
        return found[1] + posixpath.relpath(site_path(target), posixpath.dirname(site_path(file)) or ".")

    pieces = re.split(r"(^ *```.*?^ *```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(LINK.sub(link, piece) if i % 2 == 0 else piece for i, piece in enumerate(pieces))


def block(title: str, language: str, text: str) -> str:
    return f"{title}\n\n```{language}\n{text.strip()}\n```\n"


def source(path: Path) -> str:
    """The text of an example; of a notebook its code."""
    if path.suffix != ".ipynb":
        return path.read_text()
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join("".join(cell["source"]) for cell in code)


def pages() -> Iterator[tuple[str, str]]:
    """Place and text of each page that is not in docs/."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "benchmarks/README.md")
    files = [ROOT / name for name in names]
    for folder, title in (("examples", "Examples"), ("benchmarks/results", "Results")):
        found = [path for path in sorted((ROOT / folder).rglob("*")) if path.suffix in {*LANGUAGES, ".md"}]
        shown = [str(path.relative_to(ROOT / folder)) for path in found]
        lines = [f"- [{name}]({name.removesuffix('.md')}.md)" for name in shown]
        yield f"{folder}/index.md", f"# {title}\n\n" + "\n".join(lines)
        files += found
    for path in files:
        file = str(path.relative_to(ROOT))
        if path.suffix == ".md":
            yield site_path(file), relink(path.read_text(), file)
        else:
            yield site_path(file), block(f"# {path.name}", LANGUAGES.get(path.suffix, "text"), source(path))
    configs = sorted((PACKAGE / "conf").rglob("*.yaml"))
    parts = [block(f"## {path.relative_to(PACKAGE / 'conf')}", "yaml", path.read_text()) for path in configs]
    about = "The files in `lightning_lockstep/conf`: `lockstep-train --help` prints those of a command line."
    yield "configuration.md", "\n\n".join(["# Configuration keys", about, *parts])


class Docstrings(Extension):
    """Docstrings as Markdown: without Sphinx's roles, and with the section ``Ranks:`` as a paragraph."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object once it has been read."""
        if obj.docstring:
            text = re.sub(
                r":\w+:`(?:~[\w.]*\.)?([^`<]+)`",
                r"`\1`",
                obj.docstring.value,
            )
            ranks = re.compile(r"^Ranks:(.*(?:\n(?=\S| +\S)(?!\w+:\n).*)*)", re.MULTILINE)
            obj.docstring.value = ranks.sub(lambda found: f"**Ranks:** {' '.join(found[1].split())}", text)


@event_priority(100)  # before mkdocstrings looks for the folder
def on_config(config: Any) -> None:
    """Copy the sources for griffe, which reads no folder without an ``__init__.py``."""
    copy = ROOT / ".cache" / "docs" / PACKAGE.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    for folder in [path for path in copy.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of the pages in docs/ to files outside it."""
    return markdown if page.file.generated_by else relink(markdown, f"docs/{page.file.src_uri}")
