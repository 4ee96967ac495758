"""Check that every public name says what it is and what it asks of the ranks, and that private names stay brief.

Public is what the stubs (``__init__.pyi``), a subpackage's ``__init__.py`` and the modules for programs name, with the
public methods of its classes. Read from the source with ``ast``, so it works where an engine is missing too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lightning_lockstep"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

#: Of these subpackages the docs give users these names alone; the rest is for the package itself.
FOR_USERS = {"distributed": {"StepAgreement", "register_mpi_backend"}}

SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Ranks|Attributes):", re.MULTILINE)


def tree_of(module: str) -> tuple[ast.Module, Path]:
    """The source of a module, given below the package (``""`` is the package itself), its stub where it has one."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    places = [path / "__init__.pyi", path.with_suffix(".py"), path / "__init__.py"]
    file = next((place for place in places if place.exists()), None)
    if file is None:
        raise SystemExit(f"check_docstrings: there is no module lightning_lockstep.{module}")
    return ast.parse(file.read_text()), file


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Name and module of all that a module imports from this package."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning_lockstep"):
            module = (node.module or "").removeprefix("lightning_lockstep").removeprefix(".")
            for alias in node.names:
                if alias.name == "*":
                    yield from ((name, module) for name in all_of(module))
                else:
                    yield alias.name, module


def all_of(module: str) -> list[str]:
    """What ``import *`` takes from a module: its ``__all__``, or what its stub imports."""
    tree, _ = tree_of(module)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return [name for name, _ in imported(tree)]


def public_names(stub: Path) -> dict[str, str]:
    """Each name that a stub gives, with the module where its definition is looked for."""
    return dict(imported(ast.parse(stub.read_text())))


def find(name: str, module: str) -> tuple[Definition, Path] | None:
    """The class or function of that name at the top level of the module, following imports; and its file."""
    tree, file = tree_of(module)
    for node in reversed(tree.body):  # the last one: those before it are overloads
        if isinstance(node, Definition) and node.name == name:
            return node, file
    origin = dict(imported(tree)).get(name)
    return find(name, origin) if origin is not None else None


def faults_of(name: str, module: str) -> list[str]:
    """What is missing in the docstring of one public name."""
    found = find(name, module)
    if found is None:
        return [f"{name}: no class or function of that name in lightning_lockstep.{module}"]
    node, file = found
    text = ast.get_docstring(node) or ""
    where = f"{name} ({file.relative_to(PACKAGE)}:{node.lineno})"
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


def shown_to_programs() -> set[tuple[Path, str]]:
    """File and name of every top-level definition that some public module names."""
    rooms = {path.parent for path in PACKAGE.rglob("__init__.py*")}
    modules = {".".join(room.relative_to(PACKAGE).parts) for room in rooms}
    modules |= {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")}
    shown = set()
    for module in modules:
        tree, file = tree_of(module)
        own = {node.name for node in tree.body if isinstance(node, Definition)}
        shown |= {(file, name) for name in own}
        names = {name: origin for name, origin in imported(tree) if name in FOR_USERS.get(module, {name})}
        shown |= {(found[1], name) for name, origin in names.items() if (found := find(name, origin))}
    return shown


def private_sections() -> list[str]:
    """Definitions that no user sees and whose docstring has a section, a line each."""
    shown = shown_to_programs()
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for names, node in definitions(ast.parse(path.read_text()), ()):
            is_shown = (path, names[0]) in shown and not any(name.startswith("_") for name in names[1:])
            if not is_shown and SECTION.search(ast.get_docstring(node) or ""):
                faults.append(
                    f"{path.relative_to(PACKAGE)}:{node.lineno} {'.'.join(names)}: a private name has a section in its"
                    " docstring; what is worth knowing goes into a comment at the line that it explains"
                )
    return faults


def definitions(node: ast.AST, outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Definition]]:
    """Every class and function with its name and those around it; what is in a function is as private as `_x`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            names = (*outer, child.name)
            yield names, child
            inner = names if isinstance(child, ast.ClassDef) else (*names, "_")
            yield from definitions(child, inner)
        else:
            yield from definitions(child, outer)


def main() -> int:
    """Print every fault; the exit code says whether there was one."""
    table = public_names(PACKAGE / "__init__.pyi")
    faults = [fault for name, module in sorted(table.items()) for fault in faults_of(name, module)]
    faults += private_sections()
    for fault in faults:
        print(fault)
    print(f"{len(table)} public names, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
