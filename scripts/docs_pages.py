"""The pages of the site that are made from the sources: a page for each strategy and callback, and the reference.

mkdocs loads this file as a hook (see mkdocs.yml). Nothing is imported from the package, so the site is built without
torch. Files of the repository to which a page links (README, examples, benchmark results) become pages too.
"""

from __future__ import annotations

import ast
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

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_lockstep"
sys.path.insert(0, str(ROOT / "scripts"))

from check_docstrings import find, public_names  # noqa: E402

# -- Strategies and callbacks --

#: Name -> guide (a page of docs/), arguments of the one line, the part of the guide that says what is refused.
STRATEGIES = {
    "LockstepDDPStrategy": ("ddp.md", "", "when-a-rank-fails"),
    "LockstepFSDPStrategy": ("fsdp.md", "", ""),
    "LockstepMPIStrategy": ("mpi.md", "", "what-happens-when-something-goes-wrong"),
    "LockstepDeepSpeedStrategy": ("deepspeed.md", "stage=2", "limits"),
    "LockstepXLASPMDStrategy": ("xla.md", "", ""),
    "LockstepXLAStrategy": ("xla.md", "", ""),
}
CALLBACKS = {
    "OverflowDetector": ("overflow.md", "", "limits"),
    "FP32Modules": ("overflow.md", '["decoder.*.mlp"]', "fp32modules"),
    "SyncedEarlyStopping": ("stopping.md", '"val_loss"', "syncedearlystopping"),
    "StopTogether": ("stopping.md", 'stop_file="stop"', "breakpoints-signals-and-stop-files-stoptogether"),
    "RankOrderedLogging": ("logging.md", "", "rankorderedlogging"),
    "AutoBatchSize": ("batch-size.md", "global_batch_size=1024", "what-it-refuses"),
    "EffectiveBatchSize": ("batch-size.md", "1024", "the-global-batch"),
    "StragglerMonitor": ("stragglers.md", "", "what-it-cannot-see"),
    "ReplicaCheck": ("replica-check.md", "", "what-it-cannot-see"),
    "ConsolidateCheckpoints": ("deepspeed.md", "", "checkpoints"),
    "RecompileMonitor": ("recompilation.md", "", ""),
    "StaticShapes": ("static-shapes.md", "", "limits"),
}
#: Pages whose first printed output is that of another class than these.
PRINTS = {
    "OverflowDetector",
    "StopTogether",
    "RankOrderedLogging",
    "AutoBatchSize",
    "StragglerMonitor",
    "ReplicaCheck",
}
PRINTS |= {"RecompileMonitor", "LockstepDDPStrategy"}


def features() -> Iterator[tuple[str, str, str]]:
    """Path, name and text of the page of each strategy and callback."""
    for folder, table in (("strategies", STRATEGIES), ("callbacks", CALLBACKS)):
        for name, (guide, arguments, limits) in table.items():
            yield f"{folder}/{name}.md", name, feature(folder, name, guide, arguments, limits)


def one_line(folder: str, name: str, arguments: str) -> str:
    """The program of the page: the Trainer with this class."""
    made = f"{name}({arguments})"
    given = f"devices=2, strategy={made}" if folder == "strategies" else f"callbacks=[{made}]"
    return f"from lightning import Trainer\nfrom lightning_lockstep import {name}\n\ntrainer = Trainer({given})\n"


def feature(folder: str, name: str, guide: str, arguments: str, limits: str) -> str:
    text = (ROOT / "docs" / guide).read_text()
    title = re.sub(r"`|^# ", "", text.split("\n", 1)[0])
    path = definitions("__init__.pyi")[name]
    parts = [
        f"# {name}",
        summary(path).replace("``", "`"),
        fence("python", one_line(folder, name, arguments)),
        fence("bash", "\n".join(hydra_lines(folder, name))),
    ]
    printed = re.search(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if name in PRINTS and printed:
        parts += ["What it prints, for example:", fence("text", printed[1])]
    cost = re.search(r"^\*\*Cost:\*\*.*?(?=\n\n)", section(text, limits) or text, re.MULTILINE | re.DOTALL)
    cost = cost or re.search(r"^\*\*Cost:\*\*.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    if cost:
        parts.append(relink(cost[0], f"docs/{guide}", f"{folder}/{name}.md"))
    parts.append(
        f"**Guide:** [{title}](../{guide}), with its limits: [what is refused](../{guide}{'#' * bool(limits)}{limits})."
    )
    parts.append(
        f"## Options\n\n::: {path}\n    options:\n"
        + "".join(
            f"      {name}: false\n"
            for name in ("show_root_toc_entry", "show_bases", "show_root_heading", "members")
        )
    )
    return "\n\n".join(parts)


def section(text: str, anchor: str) -> str:
    """The part of a page below the heading with this anchor."""
    for heading in re.finditer(r"^(##+) (.*)\n", text, re.MULTILINE):
        if anchor and slug(heading[2]) == anchor:
            end = re.search(rf"^#{{1,{len(heading[1])}}} ", text[heading.end() :], re.MULTILINE)
            return text[heading.end() :][: end.start() if end else None]
    return ""


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def hydra_lines(folder: str, name: str) -> list[str]:
    """The options of the config group that make this class."""
    group = "strategy" if folder == "strategies" else "callbacks"
    chosen = []
    for file in sorted((PACKAGE / "conf" / group).glob("[!_]*.yaml")):
        text = file.read_text()
        shared = re.findall(r"^  - (_(?!self_)\w+)$", text, re.MULTILINE)
        text += "".join((PACKAGE / "conf" / group / f"{other}.yaml").read_text() for other in shared)
        if f"_target_: lightning_lockstep.{name}\n" in text:
            chosen.append(file.stem)
    own = [option for option in chosen if option == "overflow"] if name == "OverflowDetector" else chosen[:1]
    value = " callbacks.effective_batch_size.global_batch_size=1024" if name == "EffectiveBatchSize" else ""
    return [f"lockstep-train {group}={option}{value}" for option in (own if group == "callbacks" else chosen)]


# -- Names and their definitions --


def definitions(stub: str) -> dict[str, str]:
    """Public names of a package with the dotted path of each definition."""
    paths = {}
    for name, module in public_names(PACKAGE / stub).items():
        found = find(name, module)
        if found:
            paths[name] = ".".join((*found[1].relative_to(ROOT).with_suffix("").parts, name)).replace(
                ".__init__", ""
            )
    return paths


def summary(path: str) -> str:
    """The first paragraph of the docstring at a dotted path."""
    module, _, name = path.partition("lightning_lockstep.")[2].rpartition(".")
    found = find(name, module)
    text = (ast.get_docstring(found[0]) or "") if found else ""
    return " ".join(text.split("\n\n")[0].split())


# -- The reference --


def reference() -> Iterator[tuple[str, str]]:
    """Path and text of each page of the reference."""
    names = definitions("__init__.pyi")
    errors = {name for name, path in names.items() if ".errors." in path}
    classes = {*STRATEGIES, *CALLBACKS}
    rows = [
        f"| [`{name}`][{path}] | {cell(summary(path))} |"
        for name, path in sorted(names.items())
        if name not in errors
    ]
    yield (
        "reference/index.md",
        "# Public names\n\n`from lightning_lockstep import ...`; errors have [their own page](errors.md).\n\n"
        "| name | what it is |\n| --- | --- |\n"
        + "\n".join(rows)
        + "\n\n"
        + "\n\n".join(block(path) for name, path in sorted(names.items()) if name not in errors | classes),
    )
    for package, about in (
        ("distributed", "What ranks send to each other: for callbacks and strategies of yours"),
        ("strategies", "For a strategy of yours"),
        ("launchers", "Which rank a process is"),
        ("demo", "Models and data of `lockstep-train`"),
    ):
        stub = "__init__.pyi" if (PACKAGE / package / "__init__.pyi").exists() else "__init__.py"
        found = {name: path for name, path in definitions(f"{package}/{stub}").items() if name not in classes}
        text = "\n\n".join(block(path) for _, path in sorted(found.items()))
        yield f"reference/{package}.md", f"# `lightning_lockstep.{package}`\n\n{about}.\n\n{text}"
    yield "reference/errors.md", error_tree()
    yield "reference/configuration.md", configuration()
    yield "reference/environment.md", environment()


def block(path: str) -> str:
    return f"::: {path}\n    options:\n      heading_level: 2\n"


def error_tree() -> str:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    bases = {node.name: [ast.unparse(base) for base in node.bases] for node in classes}
    errors = [node.name for node in classes if node.name.endswith(("Error", "Preempted"))]

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in bases[name] if base in bases), default=-1)

    lines = []
    for name in errors:
        path = f"lightning_lockstep.errors.{name}"
        also = [f"`{base}`" for base in bases[name] if base not in bases and base != "Exception"]
        note = f" (also {', '.join(also)})" if also else ""
        lines.append(f"{'    ' * depth(name)}- [`{name}`][{path}]{note}: {summary(path)}")
    parts = [
        "# Errors",
        "All that this package raises on purpose. Catch `LockstepError` for all but `Preempted`.",
    ]
    return "\n\n".join(
        [*parts, "\n".join(lines), *(block(f"lightning_lockstep.errors.{node.name}") for node in classes)]
    )


KEY = re.compile(r"^( *)(?:- )?([\w/]+): ?(.*?)(?:(?:^| )# (.*))?$")


def configuration() -> str:
    """Each key of the config files with its value and its comment."""
    parts = [
        "# Configuration keys",
        "Made from the comments in `lightning_lockstep/conf`; `lockstep-train --help` prints those of a command line.",
        keys_of(PACKAGE / "conf" / "lockstep_train.yaml", "## `lockstep_train`"),
    ]
    groups = (
        "strategy",
        "callbacks",
        "trainer",
        "precision",
        "data",
        "model",
        "logger",
        "checkpoint",
        "debug",
        "experiment",
    )
    for group in groups:
        parts.append(f"## {group}")
        files = sorted(
            (PACKAGE / "conf" / group).glob("*.yaml"), key=lambda file: (file.stem[0] != "_", file.stem)
        )
        for file in files:
            title = f"Shared: `{file.stem}`" if file.stem.startswith("_") else f"`{group}={file.stem}`"
            parts.append(keys_of(file, f"### {title}"))
    return "\n\n".join(parts)


def keys_of(file: Path, title: str) -> str:
    about, rows, above = [], [], []
    place: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package") or not line.strip():
            continue
        if line.startswith("#") and not rows:
            about.append(line.removeprefix("#").removeprefix(" "))
        elif line.strip().startswith("#"):
            above.append(line.strip("# "))
        elif found := KEY.match(line):
            indent, key, value, comment = len(found[1]), found[2], found[3], found[4]
            place = [*((i, k) for i, k in place if i < indent), (indent, key)]
            if place[0][1] in ("defaults", "hydra", "header", "template") or value == "|-":
                continue
            note, above = " ".join([*above, comment or ""]).strip(), []
            if value or note:
                path = ".".join(k for _, k in place)
                rows.append(f"| `{path}` | {code(value)} | {cell(note)} |")
    shared = re.findall(r"^  - (?:/\w+/)?(_(?!self_)\w+)$", file.read_text(), re.MULTILINE)
    text = "\n".join(f"    {line[2:]}" if line.startswith("  ") else line for line in about)
    more = f"With the keys of {', '.join(f'`{name}`' for name in shared)}." if shared else ""
    table = "| key | value | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) if rows else ""
    return "\n\n".join(part for part in (title, fenced(text), more, table) if part)


def fenced(text: str) -> str:
    """Indented command lines as a block with a language."""
    return re.sub(
        r"(?:^    .*\n?)+",
        lambda m: f"\n{fence('bash', re.sub(r'(?m)^    ', '', m[0]))}\n",
        text,
        flags=re.MULTILINE,
    )


def environment() -> str:
    """The environment variables, from the table in `_settings.py`."""
    lines = re.findall(r"^# (?:``(\w+)``|  +) +(.*)$", (PACKAGE / "_settings.py").read_text(), re.MULTILINE)
    rows: list[list[str]] = []
    for name, meaning in lines:
        if name:
            rows.append([name, meaning])
        elif rows:
            rows[-1][1] += f" {meaning}"
    table = "\n".join(f"| `{name}` | {cell(plain(meaning))} |" for name, meaning in rows)
    return f"""# Environment variables and exit codes

## Environment variables

| variable | meaning |
| --- | --- |
{table}

`LOCKSTEP_RANK_...` is private: launchers set it for the ranks that they start.

## Exit codes

| code | of | means |
| --- | --- | --- |
| 0 | all | success; `lockstep-doctor`: no problem, warnings do not count |
| 1 | all | an error; `lockstep-doctor`: at least one problem |
| 2 | all | command line, configuration, or checkpoint of `lockstep-consolidate` cannot be used |
| 3 | `lockstep-doctor --strict` | no problem, and at least one warning |
| 75 | a run | stopped on request with a checkpoint (`StopTogether`); start it again to continue |
| 128 + n | a run | a rank was ended by signal n: 130 Ctrl-C, 137 SIGKILL (often out of memory), 143 SIGTERM |

`torchrun` turns all codes but 0 into 1. See [stopping](../stopping.md) and [`lockstep-doctor`](../doctor.md#exit-code).
"""


def fence(language: str, text: str) -> str:
    return f"```{language}\n{text.strip(chr(10))}\n```"


def cell(text: str) -> str:
    return plain(text).replace("|", "\\|")


def code(value: str) -> str:
    return f"`{value}`".replace("|", "\\|") if value else ""


ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`~?!?([^`<]+)`")


def plain(text: str) -> str:
    """Sphinx's roles and double backquotes as Markdown has them."""
    named = ROLE.sub(lambda role: f"`{role[1].rpartition('.')[2] if '~' in role[0] else role[1]}`", text)
    return named.replace("``", "`")


class Docstrings(Extension):
    """Docstrings as Markdown: without roles, and with the section ``Ranks:`` as a paragraph."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object once it has been read."""
        if obj.docstring:
            text = plain(obj.docstring.value)
            ranks = re.compile(r"^Ranks:(.*(?:\n(?=\S| +\S)(?!\w+:\n).*)*)", re.MULTILINE)
            text = ranks.sub(lambda found: f"**Ranks:** {' '.join(found[1].split())}", text)
            # The page of a strategy or callback begins with the first paragraph.
            obj.docstring.value = (
                text.partition("\n\n")[2] if obj.name in {**STRATEGIES, **CALLBACKS} else text
            )


# -- Files of the repository as pages --


def site_path(file: str) -> str:
    """Where a file of the repository stands in the site."""
    if file.startswith("docs/"):
        return file.removeprefix("docs/")
    if file == "README.md":
        return "index.md"
    if file in CLASS_FILES:
        return CLASS_FILES[file]
    if (ROOT / file).is_dir():
        return f"{file.rstrip('/')}/index.md"
    return file if file.endswith((".md", ".svg", ".png")) else f"{file}.md"


def class_files() -> dict[str, str]:
    """The options on the page of a class, by the file that a guide links to for them."""
    found = {}
    for folder, table in (("strategies", STRATEGIES), ("callbacks", CALLBACKS)):
        for name in table:
            path = definitions("__init__.pyi")[name].rpartition(".")[0].replace(".", "/")
            found.setdefault(f"{path}.py", f"{folder}/{name}.md#options")
    return found


CLASS_FILES = class_files()

LINK = re.compile(r"""(\]\(|<img src=")(?!\w+:|#|<)([^)#\s"]+)(#[^)\s]*)?(?=[)\s"])""")


def relink(text: str, file: str, page: str) -> str:
    """The text of a file of the repository with its links made to fit the page of the site."""

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), found[2]))
        if not (ROOT / target).exists():
            return found[0]  # the strict build names it
        return f"{found[1]}{posixpath.relpath(site_path(target), posixpath.dirname(page) or '.')}{found[3] or ''}"

    pieces = re.split(r"(^ *```.*?^ *```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(LINK.sub(link, piece) if i % 2 == 0 else piece for i, piece in enumerate(pieces))


def repository_pages() -> Iterator[tuple[str, str]]:
    """Path and text of the pages that are files of the repository."""
    for file in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"):
        yield site_path(file), relink((ROOT / file).read_text(), file, site_path(file))
    yield "LICENSE.md", "# License\n\n" + fence("text", (ROOT / "LICENSE").read_text())
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    for path in results:
        file = str(path.relative_to(ROOT))
        yield file, relink(path.read_text(), file, file)
    lines = [f"- [{path.read_text().splitlines()[0].strip('# ')}]({path.name})" for path in results]
    yield "benchmarks/results/index.md", "# Results\n\n" + "\n".join(lines)
    yield (
        "benchmarks/index.md",
        "# Benchmarks\n\n- [How to run them](README.md)\n- [Results](results/index.md)",
    )
    yield from examples()


LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".ipynb": "python", ".md": "markdown"}


def examples() -> Iterator[tuple[str, str]]:
    """A page for each example, and a list in each of their folders."""
    listed: dict[str, list[str]] = {}
    for path in sorted((ROOT / "examples").rglob("*")):
        file = str(path.relative_to(ROOT))
        if path.suffix not in LANGUAGES or "__pycache__" in file or "outputs/" in file:
            continue
        text = path.read_text()
        if path.suffix == ".md":
            page = file
            yield page, relink(text, file, page)
        else:
            page, source = f"{file}.md", cells(text) if path.suffix == ".ipynb" else text
            yield page, f"# {path.name}\n\n" + fence(LANGUAGES[path.suffix], source)
        about = re.search(r'^(?:"""|# )(.*?)(?:"""|$)', text.removeprefix("#!/bin/bash\n"), re.MULTILINE)
        words = f": {plain(about[1])}" if about and path.suffix in (".py", ".sh", ".yaml") else ""
        listed.setdefault("examples", []).append(
            f"- [{file.removeprefix('examples/')}]({page.removeprefix('examples/')}){words}"
        )
    for folder in [
        path for path in (ROOT / "examples").rglob("*") if path.is_dir() and "__" not in path.name
    ]:
        name = str(folder.relative_to(ROOT))
        inside = [
            line for line in listed["examples"] if line.startswith(f"- [{name.removeprefix('examples/')}/")
        ]
        if inside:
            depth = name.count("/")
            up = "../" * depth
            yield (
                f"{name}/index.md",
                f"# {name}\n\n" + "\n".join(line.replace("](", f"]({up}", 1) for line in inside),
            )
    yield "examples/index.md", "# Examples\n\n" + "\n".join(listed["examples"])


def cells(text: str) -> str:
    return "\n\n".join(
        "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"
    )


# -- What mkdocs calls --


@event_priority(100)  # before mkdocstrings looks for the folder
def on_config(config: Any) -> None:
    """Copy the sources for griffe, which reads no folder without an ``__init__.py``."""
    copy = ROOT / ".cache" / "docs" / PACKAGE.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    for folder in [path for path in copy.rglob("*") if path.is_dir()]:
        (folder / "__init__.py").touch()


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    made = {path: text for path, _, text in features()} | dict(reference()) | dict(repository_pages())
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of the pages in docs/ to files outside of it."""
    if page.file.generated_by:
        return markdown
    return relink(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
