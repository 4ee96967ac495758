"""Private attributes of Lightning's objects: used in one module only, each with a reason, each really there."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_lockstep
from lightning_lockstep._doors import lightning as _lightning
from lightning_lockstep._doors import lightning_internals
from tests.helpers import COMMON

PACKAGE = Path(lightning_lockstep.__file__).parent
PROBE = COMMON / "package" / "lightning_probe.py"
FAMILIES = ("lightning.pytorch", "pytorch_lightning")

# Private names of others than Lightning and torch; attributes of objects that are not the class's own.
ALLOWED = {
    # Python
    "_exit": "os",
    "_getframe": "sys",
    "_current_frames": "sys",
    "_run_exitfuncs": "atexit",
    "_args_from_interpreter_flags": "subprocess",
    "_inst": "random",
    "_fields": "namedtuple",
    "_replace": "namedtuple",
    "_render_traceback_": "what IPython asks of an exception",
    # torch_xla
    "_XLAC": "torch_xla",
    "_xla_runtime_is_initialized": "torch_xla",
    "_found_libtpu": "torch_xla",
    # numpy, tqdm
    "_rand": "numpy.random.mtrand",
    "_instances": "tqdm",
    # Hydra
    "_target_": "a key of a config",
}


# Functions whose second argument is the name of an attribute of the first.
BY_NAME = ("getattr", "setattr", "hasattr", "delattr", "put_in_place")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.isidentifier()


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    """Line, object and name of every use of a private attribute, also by getattr, setattr, vars and our patching."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            if len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield node.lineno, node.args[0], str(node.args[1].value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
            for keyword in node.keywords:
                yield node.lineno, node.args[0], keyword.arg or ""
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            of = node.value
            if isinstance(of, ast.Call) and ast.unparse(of.func) == "vars" and of.args:
                yield node.lineno, of.args[0], str(node.slice.value)
            elif isinstance(of, ast.Attribute) and of.attr == "__dict__":
                yield node.lineno, of.value, str(node.slice.value)


def is_own(value: ast.expr, name: str, own: set[str]) -> bool:
    """Whether the object is the class's own, or one of a class in the same folder that has the name."""
    if isinstance(value, ast.Name):
        return value.id in ("self", "cls") or name in own
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("super", "type")


def own_names(tree: ast.AST) -> set[str]:
    """Attributes that the classes of a file set on themselves or define."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    own.add(part.name)
                elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    own.add(part.target.id)
                elif isinstance(part, ast.Assign):
                    own |= {target.id for target in part.targets if isinstance(target, ast.Name)}
    return own


def foreign_uses(package: Path) -> list[str]:
    """Uses of private attributes of other people's objects outside `_lightning` and `_doors`, a line each."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    own: dict[Path, set[str]] = {}
    for path, tree in trees.items():
        own.setdefault(path.parent, set()).update(own_names(tree))
    return [
        f"{path.relative_to(package)}:{line}: {ast.unparse(value)}.{name}"
        for path, tree in trees.items()
        if path.parent.name not in ("_lightning", "_doors")
        for line, value, name in private_attributes(tree)
        if is_private(name) and name not in ALLOWED and not is_own(value, name, own[path.parent])
    ]


def test_private_attributes_of_lightning_are_used_in_one_module() -> None:
    assert foreign_uses(PACKAGE) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(trainer):\n    return trainer.fit_loop._anything\n",
        "def f(trainer):\n    getattr(trainer.strategy, '_anything', None)\n",
        "def f(loader):\n    vars(loader)['_anything'] = None\n",
        "class A:\n    def f(self):\n        return self.trainer._anything()\n",
        "def f(strategy):\n    with replaced(strategy, public=1, _anything=2):\n        pass\n",
        "def f(strategy):\n    put_in_place(strategy, '_anything', 2)\n",
    ],
)
def test_a_planted_use_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "planted.py").write_text(source)
    (found,) = foreign_uses(tmp_path)
    assert found.startswith("strategies/planted.py:") and "_anything" in found


@functools.cache
def attributes(family: str, path: str = "") -> dict[str, list[str]]:
    """What the objects of a small run have, by the name of their class; ``path`` goes before the installed."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, PROBE, family], capture_output=True, text=True, timeout=240, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def missing(seen: dict[str, list[str]]) -> list[str]:
    """Which of the declared names the objects do not have."""
    declared = {**lightning_internals.TOUCHED, **lightning_internals.INHERITED}
    return [name for name in declared if name.partition(".")[2] not in seen.get(name.partition(".")[0], ())]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_private_name_is_there(family: str) -> None:
    assert missing(attributes(family)) == []


def test_each_name_that_is_taken_away_is_reported() -> None:
    seen = attributes("lightning.pytorch")
    for name in {**lightning_internals.TOUCHED, **lightning_internals.INHERITED}:
        cls, _, attribute = name.partition(".")
        rest = {**seen, cls: [known for known in seen[cls] if known != attribute]}
        assert missing(rest) == [name]


def test_a_lightning_that_renames_two_of_them_is_noticed(tmp_path: Path) -> None:
    """A copy of the installed Lightning in which a property and an attribute have other names."""
    import lightning

    shutil.copytree(
        Path(lightning.__file__).parent,
        tmp_path / "lightning",
        ignore=shutil.ignore_patterns("*.pyc", "__pycache__"),
    )
    for path in (tmp_path / "lightning" / "pytorch").rglob("*.py"):
        text = path.read_text()
        renamed = re.sub(r"\b_(should_reload_train_dl|already_fit)\b", r"_elsewhere_\1", text)
        if renamed != text:
            path.write_text(renamed)
    assert missing(attributes("lightning.pytorch", str(tmp_path))) == [
        "_FitLoop._should_reload_train_dl",
        "_MultiProcessingLauncher._already_fit",
    ]


def inherited_uses() -> dict[str, set[str]]:
    """Private names of a Lightning class that a subclass in the package uses on itself or overrides.

    Returns:
        The name, and every Lightning class of the subclass's bases that has it.
    """
    seen = attributes("lightning.pytorch")
    known = {name: set(names) for name, names in seen.items()}
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem == "__main__":
            continue
        name = ".".join(["lightning_lockstep", *path.relative_to(PACKAGE).with_suffix("").parts])
        module = importlib.import_module(name.removesuffix(".__init__"))
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            bases = [base for base in cls.__mro__ if base.__module__.startswith("lightning.")]
            if not bases:
                continue
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
            used = {
                name for _, value, name in private_attributes(tree) if is_own(value, name, set())
            } | own_names(tree)
            for name in filter(is_private, used):
                owners = {
                    base.__name__
                    for base in bases
                    if name in known.get(base.__name__, ()) or name in vars(base)
                }
                if owners:
                    found[f"{cls.__qualname__}.{name}"] = {f"{owner}.{name}" for owner in owners}
    return found


def test_what_subclasses_use_of_a_private_base_is_declared() -> None:
    declared = {**lightning_internals.INHERITED, **lightning_internals.TOUCHED}
    found = inherited_uses()
    assert {use: owners for use, owners in found.items() if not owners & set(declared)} == {}
    of_bases = set().union(*found.values())
    assert [name for name in lightning_internals.INHERITED if name not in of_bases] == [], (
        "declared, but not used"
    )


def test_the_list_can_be_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_lockstep._doors"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for name in (
        *(_lightning.NAMES[name] for name in _lightning.PRIVATE),
        *lightning_internals.TOUCHED,
        *lightning_internals.INHERITED,
    ):
        assert re.search(rf"^    {re.escape(name)}: \w", done.stdout, re.MULTILINE), (
            f"{name} without a reason"
        )
