"""What people get fits together: costs, pictures, requirements, examples, config files, citation, forms for issues."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import yaml
from repository import PACKAGE, ROOT, at, imports, imports_of

README = ROOT / "README.md"
# Distributions that Lightning and DeepSpeed require, and the package imports beside these; and itself.
COMES_ALONG = {"fsspec", "lightning-utilities", "torchmetrics", "hjson", "pydantic", "lightning-lockstep"}


def problems() -> Iterator[str]:
    yield from costs_and_pictures()
    yield from results()
    yield from releases()
    yield from requirements()
    yield from source_archive()
    yield from examples()
    yield from config_files()
    yield from citation_and_forms()


def costs_and_pictures() -> Iterator[str]:
    """README's costs are those of benchmarks/results; its pictures are kept, load nothing and show no machine."""
    costs = importlib.import_module("benchmarks.costs")
    text = README.read_text()
    for cost in costs.COSTS:
        if costs.line(cost) not in text.splitlines():
            yield f"{at(README, cost.what)}: not the figures of benchmarks/results; expected: {costs.line(cost)}"
    for name in re.findall(r'src="(.*?)"', text):
        if not (ROOT / name).is_file():
            yield f"{at(README, name)}: shows {name}, which is not there"
    for picture in sorted((ROOT / "docs" / "pictures").glob("*.svg")):
        for found in re.findall(r"url\(['\"]?http|<image|@import|/(?:tmp|work|root)/", picture.read_text()):
            yield f"{at(picture, found)}: has {found}; a picture loads nothing, and has no path of a machine"


def results() -> Iterator[str]:
    """A page of results names the commit that was measured, and says if that code has changed since."""
    machine = importlib.import_module("benchmarks.machine")
    for page in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        found = re.search(r"^- commit: (\w{8})(.*)$", page.read_text(), re.MULTILINE)
        if found is None or page.stem not in machine.MEASURED:
            yield f"{at(page)}: expected a line `- commit: ...`, and the page in MEASURED of benchmarks/machine.py"
            continue
        changed = machine.has_changed(page.stem, found[1])
        expected = "; the code that is measured here has changed since" if changed else ""
        if changed is not None and found[2] != expected:
            yield f"{at(page, found[0])}: expected `- commit: {found[1]}{expected}`"


def releases() -> Iterator[str]:
    """The doctor takes those releases for tested that the package can be installed with."""
    path = ROOT / "pyproject.toml"
    doctor = importlib.import_module("lightning_lockstep.doctor.checks.packages")
    for name, versions in doctor.RELEASES.items():
        if (expected := f'"{name}{versions}"') not in path.read_text():
            yield f"{at(path, f'{name}>=')}: expected {expected}, by RELEASES of doctor/checks/packages.py"


def requirements() -> Iterator[str]:
    """What the package imports is required, if only by an extra; and what everybody gets is imported."""
    path = ROOT / "pyproject.toml"
    everybody, extras = re.split(r"^\[project.optional-dependencies\]", path.read_text(), flags=re.MULTILINE)
    for_all = named_in(everybody[everybody.index("\ndependencies = [") :])
    distributions = importlib.metadata.packages_distributions()
    used = {
        plain(name): file
        for file, found in imports().items()
        for _, imported in found
        for name in distributions.get(imported.partition(".")[0], ())
    }
    for name in sorted(used.keys() - for_all - named_in(extras) - COMES_ALONG):
        yield f"{at(used[name])}: imports {name}, which pyproject.toml does not require"
    for name in sorted(for_all - used.keys() - {"lightning"}):  # whose names `_lightning.py` looks up
        yield f"{at(path, name)}: requires {name}, which the package does not import"


def named_in(text: str) -> set[str]:
    """The distributions that a list of requirements names."""
    return {plain(name) for name in re.findall(r'^[^#]*?"([\w.-]+)', text, re.MULTILINE)}


def plain(name: str) -> str:
    """The name of a distribution as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def source_archive() -> Iterator[str]:
    """The source archive has whatever is kept at the top of the repository, but hidden files."""
    path = ROOT / "pyproject.toml"
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    for name in sorted({line.partition("/")[0] for line in listed.splitlines()} - {"pyproject.toml"}):
        if not name.startswith(".") and f'"/{name}",' not in path.read_text():
            yield f"{at(path, 'targets.sdist')}: the source archive lacks {name}"


def examples() -> Iterator[str]:
    """An example, of which people begin with a copy, imports public names; the program for checkers all of them."""
    public = {"lightning_lockstep": {"__version__"}, "lightning_lockstep.train": set()}
    public |= {
        f"lightning_lockstep.{room}": set() for room in ("callbacks", "strategies", "demo", "distributed", "launchers")
    }
    for module, names in public.items():
        names |= {*importlib.import_module(module).__all__, ""}
    for path in sorted((ROOT / "examples").rglob("*.py")):
        for line, name in imports_of(ast.parse(path.read_text())):
            module, last = (name, "") if name in public else name.rpartition(".")[::2]
            if name.partition(".")[0] == "lightning_lockstep" and last not in public.get(module, ()):
                yield f"{at(path, line)}: an example imports {name}, which no public module names"
    program = ROOT / "scripts" / "typed_program.py"
    used = {name.rpartition(".")[2] for _, name in imports_of(ast.parse(program.read_text()))}
    for name in sorted(public["lightning_lockstep"] - used - {"", "__version__"}):
        yield f"{at(program)}: the program that type checkers get does not use {name}"


def config_files() -> Iterator[str]:
    """A config file opens with a comment, and explains each of its keys in one."""
    for path in sorted((PACKAGE / "conf").rglob("*.yaml")):
        lines, in_defaults = path.read_text().splitlines(), False
        opening = [line for line in lines[:3] if line.startswith("# ") and not line.startswith("# @package")]
        if not opening and len(lines) > 3:
            yield f"{at(path)}: expected a comment in the first line that says what it is"
        for number, line in enumerate(lines, 1):
            if re.match(r"\S", line):
                in_defaults = line.startswith("defaults:")
            value = re.match(r"\s*(\w+): +[^#\s]", line)
            if in_defaults or value is None or value[1] == "_target_" or path.stem == "lockstep_train":
                continue
            if " # " not in line:
                yield f"{at(path, number)}: expected a comment with the unit or the choices of {value[1]}"


def citation_and_forms() -> Iterator[str]:
    """The citation is of this version; a form is one that GitHub accepts, and the one for bugs asks for the doctor."""
    path = ROOT / "CITATION.cff"
    citation: dict[str, Any] = yaml.safe_load(path.read_text())
    version = importlib.import_module("lightning_lockstep").__version__
    if citation.get("version") != version or not {"cff-version", "message", "title", "authors"} <= citation.keys():
        yield f"{at(path, 'version')}: expected version {version}, cff-version, message, title and authors"
    if f'license = "{citation.get("license")}"' not in (ROOT / "pyproject.toml").read_text():
        yield f"{at(path, 'license')}: another licence than in pyproject.toml"
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")):
        content: dict[str, Any] = yaml.safe_load(form.read_text())
        body = [part for part in content["body"] if part["type"] != "markdown"]
        if not {"name", "description"} <= content.keys() or len({part["id"] for part in body}) < len(body):
            yield f"{at(form)}: GitHub takes a name, a description, and parts with an id of their own each"
        for part in content["body"]:
            if part["type"] not in {"markdown", "textarea", "input", "dropdown", "checkboxes"}:
                yield f"{at(form, part['type'])}: GitHub has no part {part['type']}"
            if ("value" if part["type"] == "markdown" else "label") not in part["attributes"]:
                yield f"{at(form, part['type'])}: a part without its text"
        if not any("lockstep-doctor --json" in str(part) for part in body if part.get("id") == "doctor"):
            yield f"{at(form)}: does not ask for what lockstep-doctor --json prints"
