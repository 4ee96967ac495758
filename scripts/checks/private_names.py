"""Private names of torch, Lightning, DeepSpeed, Hydra and OmegaConf are used in `_doors/` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from repository import PACKAGE, at, imports, trees

# Private names of others, and of objects that are not of the class that uses them.
ALLOWED = {
    *("_exit", "_getframe", "_current_frames", "_run_exitfuncs", "_args_from_interpreter_flags"),  # Python
    *("_fields", "_replace"),  # of a namedtuple
    "_inst",  # random
    "_render_traceback_",  # what IPython asks of an exception
    "_rand",  # numpy.random.mtrand
    "_instances",  # tqdm
    "_distributed",  # what datasets.distributed.split_dataset_by_node leaves
    "_target_",  # a key of Hydra
}
# Rooms with a door of their own.
ROOMS = (PACKAGE / "_doors", PACKAGE / "xla")
OTHERS = re.compile(
    r"(torch|lightning|pytorch_lightning|lightning_fabric|deepspeed|hydra|omegaconf)(\.\w+)*\._[a-z]\w*"
)
# What the documentation of DeepSpeed names; all else of it comes through the door too.
OF_DEEPSPEED = re.compile(
    r"deepspeed(\.(checkpointing|accelerator(\.get_accelerator)?|utils\.safe_set_\w+))?"
)
PRIVATE = re.compile(r"_(?!_)\w*(?<!__)")
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "put_in_place")


def problems() -> Iterator[str]:
    own: dict[Path, set[str]] = {}
    for path, tree in trees().items():
        own.setdefault(path.parent, set()).update(names_of_classes(tree))
    for path, tree in trees().items():
        if path.parent in ROOMS:
            continue
        for line, name in imports()[path]:
            if OTHERS.match(name) or (name.startswith("deepspeed") and not OF_DEEPSPEED.fullmatch(name)):
                yield f"{at(path, line)}: imports {name}; private names come through _doors/"
        for node, of, name in attributes(tree):
            is_own = (
                ast.unparse(of).startswith(("super()", "type("))
                if isinstance(of, ast.Call)
                else name in own[path.parent]
            )
            if (
                PRIVATE.fullmatch(name)
                and name not in ALLOWED
                and not is_own
                and ast.unparse(of) not in ("self", "cls")
            ):
                yield f"{at(path, node.lineno)}: uses {ast.unparse(of)}.{name}; private names come through _doors/"


def attributes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, str]]:
    """Where an attribute is used, of what, and its name; by `getattr`, `vars` and our patching too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME and len(node.args) > 1:
            yield node, node.args[0], str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
            yield from ((node, node.args[0], keyword.arg or "") for keyword in node.keywords)
        elif isinstance(node, ast.Subscript) and re.match(r"vars\(|.*\.__dict__$", ast.unparse(node.value)):
            yield node, node.value, str(getattr(node.slice, "value", ""))


def names_of_classes(tree: ast.AST) -> Iterator[str]:
    """Attributes that the classes of a file define or set on themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                targets = getattr(part, "targets", [getattr(part, "target", None)])
                yield from (target.id for target in targets if isinstance(target, ast.Name))
                yield from [part.name] if isinstance(part, ast.FunctionDef) else []
