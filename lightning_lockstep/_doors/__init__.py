"""The doors to what other packages keep private: each name once, with its reason, looked up late, or one clear error.

``python -m lightning_lockstep._doors`` prints all of them. A test looks each up in the installed release, so that one
which moves a name fails there and nowhere else.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import inspect
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lightning_lockstep.errors import LockstepError

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T", bound=type)


class Door:
    """The private names of one package that this one uses."""

    def __init__(self, package: str, names: Mapping[str, str] | None = None) -> None:
        self.package = package
        self.names: dict[str, str] = dict(names or {})

    def find(self, path: str) -> Any:
        """Return what ``path`` names; raise a `LockstepError` that says what it is needed for where it is missing."""
        why = self.names[path]  # a name without a reason is our mistake
        try:
            return _look_up(path)
        except (ImportError, AttributeError) as error:
            raise LockstepError(self.explain(path, why)) from error

    def explain(self, path: str, why: str) -> str:
        """The text of the error about a missing name."""
        return (
            f"{self.package} {_version(self.package)} has no {path}, which lightning-lockstep needs: {why}. "
            f"Install a release of {self.package} that this version of lightning-lockstep was tested with: "
            f"pip install lightning-lockstep chooses one."
        )

    def touches(self, *paths: str, why: str) -> Callable[[_F], _F]:
        """Note which private names a function uses, classes by their whole path; missing ones raise as in `find`."""
        reasons = dict.fromkeys(paths, why)
        self.names.update(reasons)
        return lambda function: self._translating(function, reasons)

    def adapts(self, owner: str, /, **names: str) -> Callable[[_T], _T]:
        """Note which private names of ``owner`` the methods of a class use, with the reason of each; as `touches`."""
        reasons = {f"{owner}.{name}": why for name, why in names.items()}
        self.names.update(reasons)

        def note(adapter: _T) -> _T:
            for name, method in list(vars(adapter).items()):
                if inspect.isfunction(method):
                    setattr(adapter, name, self._translating(method, reasons))
            return adapter

        return note

    def _translating(self, function: _F, reasons: Mapping[str, str]) -> _F:
        """Return a function whose AttributeError about one of the names becomes the error of `find`."""
        if inspect.isgeneratorfunction(function):
            return function  # a context manager: what its body raises is not about a name of the door

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except AttributeError as error:
                missing = [path for path in reasons if path.rpartition(".")[2] == error.name]
                if not missing:
                    raise
                raise LockstepError(self.explain(missing[0], reasons[missing[0]])) from error

        return checked  # type: ignore[return-value]

    def missing(self) -> list[str]:
        """The names that the installed release does not have; for the tests and for a new release."""
        return [path for path in self.names if not _is_there(path)]


def _look_up(path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            # Not when a module that is there lacks something that it imports.
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise
            continue
        for name in parts[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(f"no module {parts[0]}", name=parts[0])


def _is_there(path: str) -> bool:
    try:
        _look_up(path)
    except AttributeError:
        owner, _, name = path.rpartition(".")
        try:
            return _sets_on_itself(_look_up(owner), name)
        except (ImportError, AttributeError):
            return False
    except ImportError:
        return False
    return True


def _sets_on_itself(owner: Any, name: str) -> bool:
    """Whether objects of a class have an attribute that the class has not, or a function sets it on an argument."""
    if not inspect.isclass(owner) and not inspect.isfunction(owner):
        return False
    bases: tuple[Any, ...] = getattr(owner, "__mro__", (owner,))
    for base in bases:
        if name in getattr(base, "__annotations__", {}) or name in getattr(base, "__slots__", ()):
            return True
        if name in _set_in(base):
            return True
    return False


@functools.cache
def _set_in(owner: Any) -> frozenset[str]:
    """Attributes that the source of a class sets on ``self``, or that of a function on anything."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError, SyntaxError):  # of a compiled module
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and (inspect.isfunction(owner) or ast.unparse(node.value) == "self")
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
