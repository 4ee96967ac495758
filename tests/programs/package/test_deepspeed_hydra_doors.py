"""What DeepSpeed, Hydra and OmegaConf keep private: one door each, every name with a reason and really there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lightning_lockstep
from lightning_lockstep._doors.deepspeed_engines import DEEPSPEED, EngineAdapter
from lightning_lockstep._doors.hydra_internals import HYDRA, OMEGACONF, whole_config
from lightning_lockstep.errors import LockstepError

PACKAGE = Path(lightning_lockstep.__file__).parent
DOORS = (DEEPSPEED, HYDRA, OMEGACONF)

# What of these packages is imported outside of the doors: what their documentation names.
PUBLIC = (
    *(
        "deepspeed",
        "deepspeed.checkpointing",
        "deepspeed.accelerator",
        "deepspeed.accelerator.get_accelerator",
    ),
    *("deepspeed.utils.safe_set_full_fp32_param", "deepspeed.utils.safe_set_full_optimizer_state"),
    *("deepspeed.utils.safe_set_local_fp32_param", "deepspeed.utils.safe_set_local_optimizer_state"),
)
# Names of the doors that objects of others have too, so that a use does not tell whose it is.
OF_OTHERS = frozenset(
    (
        *(
            "buffer",
            "check",
            "comm",
            "config",
            "dtype",
            "groups",
            "load",
            "name",
            "ops",
            "optimizer",
            "utils",
        ),
        "gradient_accumulation_steps",  # public on the engine, not on its optimizer
        "skipped_steps",  # our counters have them
    )
)

MISSING = """
import json, sys
from lightning_lockstep._doors.deepspeed_engines import DEEPSPEED
from lightning_lockstep._doors.hydra_internals import HYDRA, OMEGACONF

before = [name for name in ("deepspeed", "hydra", "omegaconf") if name in sys.modules]
from lightning_lockstep.deepspeed.importing import import_deepspeed

if sys.argv[1:]:
    import_deepspeed("cpu")
    CHANGE
doors = (DEEPSPEED, HYDRA, OMEGACONF) if sys.argv[1:] else (HYDRA, OMEGACONF)
print(json.dumps([before, {door.package: door.missing() for door in doors}]))
"""


def look(change: str = "pass") -> tuple[list[str], dict[str, list[str]]]:
    """Return which of the packages the doors import by themselves, and what each lacks, after a change of DeepSpeed."""
    known = ["deepspeed"] if find_spec("deepspeed") is not None else []
    done = subprocess.run(
        [sys.executable, "-c", MISSING.replace("CHANGE", change), *known],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, missing = json.loads(done.stdout.splitlines()[-1])
    return imported, missing


def test_every_name_is_in_the_installed_releases_and_the_doors_import_none_of_them() -> None:
    imported, missing = look()
    assert imported == []
    assert {package: names for package, names in missing.items() if names} == {}


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_deepspeed_without_some_of_the_names_is_noticed() -> None:
    """A name of a module, a method of a class, and an attribute of parameters that a function sets."""
    _, missing = look(
        "import deepspeed.utils, deepspeed.runtime.bf16_optimizer as b;"
        "del deepspeed.utils.groups._WORLD_GROUP, b.BF16_Optimizer.clear_hp_grads;"
        "deepspeed.utils.link_hp_params = lambda: None"
    )
    assert missing["deepspeed"] == [
        "deepspeed.utils.groups._WORLD_GROUP",
        "deepspeed.utils.link_hp_params._hp_mapping",
        "deepspeed.runtime.bf16_optimizer.BF16_Optimizer.clear_hp_grads",
    ]


def test_each_name_has_a_reason() -> None:
    assert [name for door in DOORS for name, why in door.names.items() if len(why.split()) < 3] == []


def test_a_missing_name_is_one_clear_error() -> None:
    with pytest.raises(
        LockstepError, match=r"deepspeed .* has no deepspeed\.runtime\.engine\..*\.param_names, which"
    ):
        EngineAdapter(SimpleNamespace(optimizer=None)).parameter_names()
    with pytest.raises(LockstepError, match=r"omegaconf .* has no omegaconf\.base\.Node\._get_parent, which"):
        whole_config(SimpleNamespace())


def imports_of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and str(node.value).startswith(
        ("hydra._internal", "deepspeed.runtime")
    ):
        yield str(node.value)  # for import_module


def attributes_of(node: ast.AST) -> Iterator[tuple[ast.expr, Any]]:
    if isinstance(node, ast.Attribute):
        yield node.value, node.attr
    elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        if ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr", "put_in_place"):
            yield node.args[0], node.args[1].value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "replaced":
        yield from ((node.args[0], keyword.arg) for keyword in node.keywords)


def is_private_import(name: str) -> bool:
    first, *parts = name.split(".")
    if first == "deepspeed":
        return name not in PUBLIC
    return first in ("hydra", "omegaconf") and any(part.startswith("_") for part in parts)


def uses_outside(package: Path) -> list[str]:
    """Uses of what the doors are for in other files, a line each."""
    kept = {name.rpartition(".")[2] for door in DOORS for name in door.names} - OF_OTHERS
    found = []
    for path in sorted(package.rglob("*.py")):
        if path.parent.name == "_doors":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(package)}:{getattr(node, 'lineno', 0)}"
            found += [f"{where}: imports {name}" for name in imports_of(node) if is_private_import(name)]
            found += [
                f"{where}: {ast.unparse(of)}.{name}"
                for of, name in attributes_of(node)
                if name in kept and ast.unparse(of) not in ("self", "cls")
            ]
    return found


def test_no_other_file_uses_what_is_private_there() -> None:
    assert uses_outside(PACKAGE) == []


@pytest.mark.parametrize(
    "source",
    [
        "from hydra._internal.utils import get_args_parser\n",
        "def f():\n    from hydra.core.utils import _flush_loggers\n",
        "import importlib\nimportlib.import_module('hydra._internal.utils')\n",
        "from deepspeed.runtime.zero import parameter_offload\n",
        "def f(node):\n    return node._value()\n",
        "def f(container, key):\n    return container._get_node(key)\n",
        "def f(engine):\n    return engine.zero_optimization_partition_weights()\n",
        "def f(optimizer):\n    return getattr(optimizer, 'averaged_gradients', None)\n",
        "def f(engine):\n    with replaced(engine, micro_steps=0):\n        pass\n",
        "def f(parameter):\n    return parameter._hp_mapping is None\n",
    ],
)
def test_a_planted_use_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "planted.py").write_text(source)
    (found,) = uses_outside(tmp_path)
    assert found.startswith("deepspeed/planted.py:")
