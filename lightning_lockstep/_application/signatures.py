"""Signatures of this package's own targets, read from source: torch and Lightning need not be imported to ask them."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_OWN = "lightning_lockstep"
# What a name may be bound to for an annotation to name it: other types, nothing that does something when it is made.
_TYPES = (ast.Subscript, ast.BinOp, ast.Name, ast.Attribute)


def read_target(path: str) -> Callable[..., Any] | None:
    """Return a stand-in for what a `_target_` names, with its name, signature and types."""
    # `None` where it is not this package's, where only the import tells, or where importing costs nothing any more.
    module, _, name = path.rpartition(".")
    if "torch" in sys.modules or not f"{path}.".startswith(f"{_OWN}."):
        return None
    found = None
    with suppress(Exception):  # whatever cannot be read is imported instead
        found = _named(module, name)
    return found if inspect.isfunction(found) or "__init__" in getattr(found, "__dict__", ()) else None


class _Source(dict[str, Any]):
    """The names of a module as its source binds them, each read when it is asked for."""

    def __init__(self, module: str, file: Path) -> None:
        super().__init__()
        self._module, self._is_package = module, file.stem == "__init__"
        self._statements = list(_flat(ast.parse(file.read_bytes()).body))

    def __missing__(self, name: str) -> Any:
        for node in self._statements:
            with suppress(KeyError):
                self[name] = value = self._bound(node, name)
                return value
        raise KeyError(name)

    def _bound(self, node: ast.stmt, name: str) -> Any:
        """What a statement binds a name to; a `KeyError` where it does not."""
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return self._class(node) if isinstance(node, ast.ClassDef) else self._function(node)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    return _named(self._origin(node), name if alias.name == "*" else alias.name)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return _Names(alias.name if alias.asname else name)
        if isinstance(node, ast.Assign) and isinstance(node.value, _TYPES):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == name:
                    return self._value(node.value)
        raise KeyError(name)

    def _origin(self, node: ast.ImportFrom) -> str:
        package = self._module if self._is_package else self._module.rpartition(".")[0]
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)

    def _value(self, expression: ast.expr) -> Any:
        return eval(compile(ast.Expression(expression), self._module, "eval"), {}, self)

    def _class(self, node: ast.ClassDef) -> Any:
        if any("Enum" in ast.unparse(base) for base in node.bases):
            return Any  # a plain value may be one of its members
        made = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
        own = {"__init__": self._function(made)} if isinstance(made, ast.FunctionDef) else {}
        return type(node.name, (), {"__class_getitem__": classmethod(lambda cls, _: cls), **own})

    def _function(self, node: ast.FunctionDef) -> Callable[..., Any]:
        """A function of the same name, parameters and types that does nothing."""
        given, hints = node.args, {}
        for argument in [*given.posonlyargs, *given.args, *given.kwonlyargs]:
            with suppress(Exception):  # names what cannot be read: such an argument takes anything
                hint = self._value(argument.annotation) if argument.annotation is not None else Any
                if "ForwardRef" not in repr(hint):
                    hints[argument.arg] = hint
        for part in filter(
            None, [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        ):
            part.annotation = None
        given.defaults = list(map(_default, given.defaults))
        given.kw_defaults = [default and _default(default) for default in given.kw_defaults]
        bare = ast.parse(f"def {node.name}(): raise NotImplementedError('read, not imported')")
        bare.body[0].args = given  # type: ignore[attr-defined]
        names: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(bare), self._module, "exec"), names)
        function: Callable[..., Any] = names[node.name]
        function.__annotations__ = hints
        return function


def _default(expression: ast.expr) -> ast.expr:
    with suppress(ValueError):
        ast.literal_eval(expression)
        return expression
    return ast.Constant(...)  # there is one, of whatever value


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under its conditions too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _flat([*node.body, *node.orelse])


class _Names:
    """A module that an annotation names, such as `torch` in `torch.Tensor`."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return _named(self._module, name)


def _named(module: str, name: str) -> Any:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return getattr(importlib.import_module(module), name)
    return _source(module)[name]


@functools.cache
def _source(module: str) -> _Source:
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)  # imports nothing, since it is no part of a package
    if spec is None or spec.origin is None:
        raise KeyError(module)
    path = Path(spec.origin).parent.joinpath(*rest)
    # A stub names what its package loads later.
    places = [path / "__init__.pyi", Path(f"{path}.pyi"), path / "__init__.py", Path(f"{path}.py")]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise KeyError(module)
    return _Source(module, file)
