"""Check that every public name says what it is and what it asks of the ranks.

Read from the source with ``ast``: no import, so it also works where an optional engine is missing.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_lockstep"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def exports() -> dict[str, str]:
    """Public name to the module that defines it, from the literal table in ``_exports.py``."""
    for node in ast.parse((PACKAGE / "_exports.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "EXPORTS" and node.value:
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise SystemExit("check_docstrings: lightning_lockstep/_exports.py has no literal table EXPORTS")


def find(name: str, module: str) -> Definition | None:
    """The class or function of that name at the top level of the module, following a re-export."""
    path = PACKAGE.joinpath(*module.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module and any(a.name == name for a in node.names):
            return find(name, node.module.removeprefix("lightning_lockstep."))
    return None


def faults_of(name: str, module: str) -> list[str]:
    """What is missing in the docstring of one public name."""
    node = find(name, module)
    if node is None:
        return [f"{name}: no class or function of that name in lightning_lockstep.{module}"]
    text = ast.get_docstring(node) or ""
    where = f"{name} (lightning_lockstep.{module}:{node.lineno})"
    faults = []
    if not text:
        faults.append(f"{where}: no docstring")
    if "Ranks:" not in text:
        faults.append(f"{where}: no 'Ranks:' line (who must call it, what it communicates, its cost)")
    if has_arguments(node) and "Args:" not in text:
        faults.append(f"{where}: it takes arguments, but its docstring has no 'Args:'")
    return faults


def has_arguments(node: Definition) -> bool:
    """Whether a caller can pass something; errors take a message, which needs no words."""
    if isinstance(node, ast.ClassDef):
        if node.name.endswith("Error"):
            return False
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        return any(has_arguments(init) for init in inits)
    names = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    return bool(set(names) - {"self", "cls"})


def main() -> int:
    """Print every fault; the exit code says whether there was one."""
    table = exports()
    faults = [fault for name, module in sorted(table.items()) for fault in faults_of(name, module)]
    for fault in faults:
        print(fault)
    print(f"{len(table)} public names, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
