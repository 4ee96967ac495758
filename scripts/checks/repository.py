"""The files that the checks read, and where a text stands in them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_lockstep"
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]


def at(path: Path, where: int | str = 1) -> str:
    """Return `file:line` of a line by its number, or of the first one with a text."""
    if isinstance(where, str):
        lines = path.read_text().splitlines()
        where = next((number for number, line in enumerate(lines, 1) if where in line), 1)
    return f"{path.relative_to(ROOT)}:{where}"


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return each module of the package, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(tree: ast.AST, module: str = "", is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of all that a module imports, also inside functions and by importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("torch.distributed"):
            yield node.lineno, dotted(node)


def dotted(node: ast.AST) -> str:
    """Return ``a.b.c`` of names alone, else the empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


@functools.cache
def imports() -> dict[Path, list[tuple[int, str]]]:
    """Return what each module of the package imports."""
    return {path: [*imports_of(tree, module_name(path), path.name == "__init__.py")] for path, tree in trees().items()}
