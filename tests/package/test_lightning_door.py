"""The one module through which Lightning's names come, under both names Lightning is published by."""

from __future__ import annotations

import json
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any

import pytest

from lightning_lockstep import _lightning

PROBE = """
import json, sys
{first}
from lightning_lockstep import _lightning as door
named = {{name: getattr(door, name) for name in [*door._PUBLIC, *door._PRIVATE]}}
print(json.dumps({{
    "pytorch": door.PYTORCH, "fabric": door.FABRIC,
    "modules": {{name: getattr(value, "__module__", "") for name, value in named.items()}},
    "both": [n for n in ("lightning.pytorch", "pytorch_lightning") if n in sys.modules],
}}))
"""


def probe(first: str) -> Any:
    code = PROBE.format(first=first)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("first", "family"),
    [
        ("", "lightning"),
        ("import lightning.pytorch", "lightning"),
        ("import pytorch_lightning", "pytorch_lightning"),
        ("import pytorch_lightning, lightning.pytorch", "lightning"),
    ],
)
def test_every_name_resolves_in_the_family_the_program_uses(first: str, family: str) -> None:
    seen = probe(first)
    roots = {
        "lightning": ("lightning.pytorch", "lightning.fabric"),
        "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
    }[family]
    assert (seen["pytorch"], seen["fabric"]) == roots
    strangers = {
        name: module
        for name, module in seen["modules"].items()
        # functions that both families take from lightning_utilities belong to neither
        if module and not module.startswith((*roots, "lightning_utilities"))
    }
    assert strangers == {}


def test_a_program_on_one_family_does_not_get_the_other_too() -> None:
    assert probe("import pytorch_lightning")["both"] == ["pytorch_lightning"]


def test_every_private_name_says_why() -> None:
    path = Path(_lightning.__file__)
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    comment_lines = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    without = []
    for name in _lightning._PRIVATE:
        entry = next(
            token.start[0]
            for token in tokens
            if token.type == tokenize.STRING and token.string == f'"{name}"'
        )
        # Names of one purpose may share a comment: look upwards past the entries directly above.
        line = entry - 1
        while line not in comment_lines and line > 0 and path.read_text().splitlines()[line - 1].strip():
            line -= 1
            if "_PRIVATE" in path.read_text().splitlines()[line - 1]:
                break
        if line not in comment_lines:
            without.append(name)
    assert without == []


def test_private_names_are_in_the_private_table() -> None:
    assert [name for name in _lightning._PUBLIC if name.startswith("_")] == []
    assert [name for name in _lightning._PRIVATE if not name.startswith("_")] == []


def test_type_checkers_see_the_same_names() -> None:
    """The names under TYPE_CHECKING and those in the tables are written twice: they must be one list."""
    import ast

    tree = ast.parse(Path(_lightning.__file__).read_text())
    block = next(
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    typed = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed == {*_lightning._PUBLIC, *_lightning._PRIVATE}
