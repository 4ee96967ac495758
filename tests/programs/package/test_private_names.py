"""The doors to private names: each name is there, one that is taken away is reported, and nobody goes past them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_lockstep
from lightning_lockstep import _doors as private_names
from lightning_lockstep._doors import Door, torch_internals
from lightning_lockstep._doors.torch_internals import TORCH, TORCH_IF_THERE
from lightning_lockstep.errors import LockstepError

PACKAGE = Path(lightning_lockstep.__file__).parent
ROOMS_WITH_THEIR_OWN = ("_doors", "_lightning", "xla")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name.isidentifier()


# ------------------------------------------------------------------ the names of torch


def test_torch_has_every_name() -> None:
    assert TORCH.missing() == []


def test_what_some_builds_lack_is_there_on_objects_or_not_needed() -> None:
    assert set(TORCH_IF_THERE.missing()) <= {
        "torch._C._distributed_c10d._dump_nccl_trace",  # of builds with CUDA
        "torch.distributed.distributed_c10d._FR_SELF_RECORDING_BACKENDS",  # from 2.15 on
        "torch.nn.Module.state_dict._metadata",  # of what it returns
    }
    state = nn.Linear(1, 1).state_dict()
    assert torch_internals.versions_of_modules(state) == {"": {"version": 1}}
    assert torch_internals.versions_of_modules({}) is None
    assert [name for name, _ in torch_internals.flight_recorders()]


def test_every_name_has_a_reason_and_one_that_says_something() -> None:
    for path, why in {**TORCH.names, **TORCH_IF_THERE.names}.items():
        assert path.startswith("torch.") and len(why) > 20, path


def test_each_name_stands_once_in_the_door() -> None:
    source = Path(torch_internals.__file__).read_text()
    texts = [one.value for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Constant)]
    whole = [text for text in texts if isinstance(text, str) and text.startswith("torch.")]
    twice = {path for path in whole if whole.count(path) > 1}
    # Noted, and looked up by the function below.
    looked_up = {"torch.Tensor._version", "torch._amp_foreach_non_finite_check_and_unscale_", "torch._dynamo"}
    assert twice == looked_up


def test_each_name_that_is_taken_away_is_reported() -> None:
    for path in TORCH.names:
        owner, _, name = path.rpartition(".")
        renamed = Door("torch", {f"{owner}.{name}_elsewhere": "for a test"})
        assert renamed.missing() == [f"{owner}.{name}_elsewhere"]


def test_a_function_of_torch_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_copy_")
    with pytest.raises(
        LockstepError, match=r"^torch 2\S+ has no torch\._foreach_copy_, which .* needs: one fused"
    ):
        torch_internals.copy_each([torch.zeros(1)], [torch.ones(1)])
    torch_internals.non_finite_check.cache_clear()
    monkeypatch.delattr(torch, "_amp_foreach_non_finite_check_and_unscale_")
    with pytest.raises(LockstepError, match="_amp_foreach_non_finite_check_and_unscale_, which"):
        torch_internals.non_finite_check()


def test_an_attribute_of_an_object_of_torch_that_is_gone_is_named() -> None:
    module = nn.Linear(1, 1)
    del vars(module)["_buffers"]
    with pytest.raises(LockstepError, match=r"has no torch\.nn\.Module\._buffers, which"):
        torch_internals.buffers_at([(module, "some")])


def test_versions_and_checks_are_those_of_torch() -> None:
    version, tensor = torch_internals.version_getter(), torch.zeros(1)
    before = version(tensor)
    tensor.add_(1)
    assert version(tensor) == before + 1
    flag = torch.zeros(1)
    torch_internals.non_finite_check()([tensor, torch.tensor([float("inf")])], flag, torch.ones(()))
    assert flag.item() == 1


# ------------------------------------------------------------------ the class, on a fake package


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package with a module, a class and a function, none of which is on the disk."""

    class Thing:
        _annotated: int

        def __init__(self) -> None:
            self._set = 1

    package, module = types.ModuleType("some_fake"), types.ModuleType("some_fake._inner")
    package.__path__ = []
    vars(module).update(Thing=Thing, _function=len)
    monkeypatch.setitem(sys.modules, "some_fake", package)
    monkeypatch.setitem(sys.modules, "some_fake._inner", module)
    return module


def test_a_name_is_found_where_it_is(fake: types.ModuleType) -> None:
    names = ["_function", "Thing", "Thing._annotated", "Thing._set"]
    door = Door("some_fake", {f"some_fake._inner.{name}": "for a test" for name in names})
    assert door.missing() == []
    assert door.find("some_fake._inner._function") is len


@pytest.mark.parametrize(
    "path",
    [
        "some_fake._inner._gone",
        "some_fake._inner.Thing._gone",
        "some_fake._gone._function",
        "some_fake._inner._gone.deeper",
        "no_such_fake._function",
    ],
)
def test_a_missing_name_is_one_clear_error(fake: types.ModuleType, path: str) -> None:
    door = Door("some_fake", {path: "it says something"})
    assert door.missing() == [path]
    with pytest.raises(LockstepError) as caught:
        door.find(path)
    text = str(caught.value)
    assert (
        f"some_fake (not installed) has no {path}, which lightning-lockstep needs: it says something." in text
    )
    assert "pip install lightning-lockstep" in text
    assert caught.value.__cause__ is not None


def test_a_name_without_a_reason_is_not_looked_up(fake: types.ModuleType) -> None:
    with pytest.raises(KeyError):
        Door("some_fake").find("some_fake._inner._function")


def test_what_a_module_lacks_itself_is_no_missing_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("import no_such_module_of_theirs\n_name = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_theirs"):
        private_names._look_up("breaks_on_import._name")


def test_a_missing_attribute_is_named_where_a_function_touches_it(fake: types.ModuleType) -> None:
    door = Door("some_fake")

    @door.touches("some_fake._inner.Thing._set", "some_fake._inner.Thing._gone", why="both are summed")
    def both(thing: object) -> int:
        """Sum."""
        return thing._set + thing._gone  # type: ignore[attr-defined,no-any-return]

    assert door.names == dict.fromkeys(
        ["some_fake._inner.Thing._set", "some_fake._inner.Thing._gone"], "both are summed"
    )
    assert door.missing() == ["some_fake._inner.Thing._gone"]
    assert (both.__name__, both.__doc__) == ("both", "Sum.")
    thing = fake.Thing()
    with pytest.raises(LockstepError, match=r"has no some_fake\._inner\.Thing\._gone, .* both are summed"):
        both(thing)
    thing._gone = 2
    assert both(thing) == 3


def test_a_missing_attribute_is_named_where_a_method_of_an_adapter_touches_it(fake: types.ModuleType) -> None:
    door = Door("some_fake")

    @door.adapts("some_fake._inner.Thing", _set="one of two", _gone="the other of two")
    class Adapter:
        def __init__(self, thing: object) -> None:
            self.thing = thing

        def both(self) -> int:
            return self.thing._set + self.thing._gone  # type: ignore[attr-defined,no-any-return]

    assert door.names == {
        "some_fake._inner.Thing._set": "one of two",
        "some_fake._inner.Thing._gone": "the other of two",
    }
    with pytest.raises(LockstepError, match=r"has no some_fake\._inner\.Thing\._gone, .*: the other of two"):
        Adapter(fake.Thing()).both()


def test_an_error_about_another_attribute_passes_through(fake: types.ModuleType) -> None:
    door = Door("some_fake")

    @door.touches("some_fake._inner.Thing._set", why="for a test")
    def other(thing: object) -> int:
        return thing.users_own  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(AttributeError, match="users_own"):
        other(fake.Thing())


def test_the_body_of_a_context_manager_raises_what_it_raises(fake: types.ModuleType) -> None:
    door = Door("some_fake")

    @contextmanager
    @door.touches("some_fake._inner.Thing._set", why="for a test")
    def inside() -> Iterator[None]:
        yield

    with pytest.raises(AttributeError, match="_set"), inside():
        _ = object()._set  # type: ignore[attr-defined]


# ------------------------------------------------------------------ nobody goes past the door


def of_torch(package: Path) -> list[str]:
    """Private names of torch that a file uses which is no door, by import, by attribute or as a text; a line each."""
    names = {path.rpartition(".")[2] for path in (*TORCH.names, *TORCH_IF_THERE.names)}
    names = {name for name in names if is_private(name)}
    return [
        f"{path.relative_to(package)}:{line}: {use}"
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] not in ROOMS_WITH_THEIR_OWN
        for line, use in _uses(ast.parse(path.read_text()), names)
    ]


def _uses(tree: ast.Module, names: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each use."""
    modules = {"torch"}  # what names of torch's modules are bound to
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            if node.value in names:
                yield node.lineno, repr(node.value)
            found = [node.value] if re.fullmatch(r"torch(\.\w+)+", node.value) else []
        elif isinstance(node, ast.Attribute):
            value = ast.unparse(node.value)
            of_an_object = node.attr in names and value not in ("self", "cls", "super()")
            if of_an_object or (is_private(node.attr) and value.partition(".")[0] in modules):
                yield node.lineno, f"{value}.{node.attr}"
        for path in found:
            if path.partition(".")[0] == "torch" and any(map(is_private, path.split("."))):
                yield getattr(node, "lineno", 0), path
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            of = getattr(node, "module", None) or ""
            modules |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if (of or alias.name).partition(".")[0] == "torch"
            }


def test_private_names_of_torch_come_through_the_door() -> None:
    assert of_torch(PACKAGE) == []


@pytest.mark.parametrize(
    "source",
    [
        "from torch.utils._pytree import tree_map\n",
        "from torch._dynamo import config\n",
        "import torch._inductor\n",
        "import torch.distributed as dist\nx = dist._anything\n",
        "import torch\nx = torch._C._anything\n",
        "import torch\nx = torch.ops.aten._anything\n",
        "from torch import nn\nx = nn.Module._anything\n",
        "def f(tensor):\n    return tensor._version\n",
        "def f(module):\n    return getattr(module, '_orig_mod', None)\n",
        "def f(module):\n    return vars(module)['_buffers']\n",
        "import sys\nx = sys.modules.get('torch._dynamo')\n",
    ],
)
def test_a_planted_use_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "planted.py").write_text(source)
    (tmp_path / "_doors").mkdir()
    (tmp_path / "_doors" / "door.py").write_text(source)
    found = of_torch(tmp_path)
    assert found and all(line.startswith("steps/planted.py:") for line in found)


# ------------------------------------------------------------------ the list


def test_the_list_of_all_doors_can_be_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_lockstep._doors"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Private names of Lightning's objects: \d+$", done.stdout, re.MULTILINE)
    for title, door in (("torch", TORCH), ("torch that some builds or releases lack", TORCH_IF_THERE)):
        assert f"\nPrivate names of {title}: {len(door.names)}\n" in done.stdout
        for name, why in door.names.items():
            assert f"\n    {name}: {why}\n" in done.stdout
