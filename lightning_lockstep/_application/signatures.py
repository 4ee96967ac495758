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
    """Return a stand-in for what a `_target_` names, with its name, signature and types.

    `None` where it is not this package's, where only the import tells, or where importing it costs nothing any more.
    """
    module, _, name = path.rpartition(".")
    if "torch" in sys.modules or not f"{path}.".startswith(f"{_OWN}."):
        return None
    found = None
    with suppress(Exception):  # whatever cannot be read is imported instead
        found = _named(module, name)
    return found if callable(getattr(found, "__signature__", None) and found) else None


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
        parts: dict[str, Any] = {"__class_getitem__": classmethod(lambda cls, _: cls)}
        made = next((part for part in node.body if getattr(part, "name", "") == "__init__"), None)
        if isinstance(made, ast.FunctionDef):
            init = self._function(made)
            signature = inspect.signature(init)
            parameters = list(signature.parameters.values())[1:]
            parts |= {"__init__": init, "__signature__": signature.replace(parameters=parameters)}
        return type(node.name, (), parts)

    def _function(self, node: ast.FunctionDef) -> Callable[..., Any]:
        given = node.args
        kinds = inspect.Parameter
        positional = [*given.posonlyargs, *given.args]
        defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults, *given.kw_defaults]
        groups = [
            *((argument, kinds.POSITIONAL_OR_KEYWORD) for argument in positional),
            *((argument, kinds.KEYWORD_ONLY) for argument in given.kwonlyargs),
        ]
        hints = {}
        parameters = []
        for (argument, kind), default in zip(groups, defaults, strict=True):
            parameters.append(kinds(argument.arg, kind, default=self._default(default)))
            with suppress(Exception):  # names what cannot be read: such an argument takes anything
                hint = self._value(argument.annotation) if argument.annotation is not None else Any
                if "ForwardRef" not in repr(hint):
                    hints[argument.arg] = hint
        if given.kwarg is not None:
            parameters.append(kinds(given.kwarg.arg, kinds.VAR_KEYWORD))

        def stand_in(*_: Any, **__: Any) -> None:
            raise NotImplementedError(f"{node.name} was read, not imported")

        stand_in.__name__ = node.name
        stand_in.__annotations__ = hints
        stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return stand_in

    def _default(self, expression: ast.expr | None) -> Any:
        if expression is None:
            return inspect.Parameter.empty
        with suppress(ValueError):
            return ast.literal_eval(expression)
        return ...  # there is one, of whatever value


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
