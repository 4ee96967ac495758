"""A private name of another package that the package uses is in a list in `tests/unit/package/private_names`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from repository import ROOT, at, trees

LISTS = ROOT / "tests" / "unit" / "package" / "private_names"
# Of Python, namedtuples, random, IPython, numpy, tqdm and datasets; a key of Hydra.
OTHERS = {
    *(
        "_exit",
        "_getframe",
        "_current_frames",
        "_run_exitfuncs",
        "_args_from_interpreter_flags",
        "_fields",
        "_replace",
    ),
    *("_inst", "_render_traceback_", "_rand", "_instances", "_distributed", "_target_"),
}
PRIVATE = re.compile(r"_(?!_)\w*(?<!__)")


def problems() -> Iterator[str]:
    listed = {name for file in LISTS.glob("*.txt") for name in re.findall(r"\w+", file.read_text())}
    own = {name for tree in trees().values() for node in ast.walk(tree) for name in defined(node)}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) in ("self", "cls"):
                continue
            if PRIVATE.fullmatch(node.attr) and node.attr not in listed | own | OTHERS:
                yield f"{at(path, node.lineno)}: {node.attr} is in no list of {LISTS.relative_to(ROOT)}"


def defined(node: ast.AST) -> Iterator[str]:
    """Yield the name that a node of the package gives to a function, a class, a variable or an attribute of its own."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else "self"
        yield from [ast.unparse(node).rpartition(".")[2]] if owner in ("self", "cls") else []
