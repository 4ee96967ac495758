"""Imports flow one way, and three doors stay the only ones; read from the sources with ``ast``."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_lockstep

PACKAGE = Path(lightning_lockstep.__file__).parent

GROUND = {"errors", "_doors", "_registry", "_settings", "_system", "_text"}
TALK = GROUND | {"distributed"}
MIDDLE = TALK | {"launchers", "numerics", "steps", "logs", "stopping"}
FEATURES = MIDDLE | {"overflow", "batch_size", "stragglers", "replicas", "deepspeed", "xla", "shapes"}
PARTS = FEATURES | {"strategies", "callbacks", "demo", "components", "conf"}

# room (folder or module at the top of the package) -> the rooms it may import; itself always
ALLOWED: dict[str, set[str]] = {
    # at run time only these two; the public names for type checkers
    "__init__": {"_registry"} | FEATURES | {"strategies", "callbacks", "tuner", "notebook"},
    "_registry": {"_doors", "errors"},
    "errors": set(),
    "_doors": {"errors"},
    "_settings": {"errors"},
    "_system": {"errors", "_text"},
    "_text": set(),
    "distributed": GROUND,
    "launchers": TALK,
    "numerics": TALK,
    "steps": TALK,
    "logs": TALK,
    "stopping": TALK | {"steps"},
    "overflow": TALK | {"numerics", "steps"},
    "batch_size": TALK | {"numerics", "steps"},
    "stragglers": TALK,
    "replicas": TALK | {"steps"},
    "deepspeed": TALK | {"numerics", "steps"},
    "xla": TALK | {"numerics", "steps"},
    "shapes": TALK | {"batch_size", "xla"},
    "strategies": MIDDLE | {"deepspeed", "xla"},
    "callbacks": FEATURES,
    "tuner": FEATURES | {"callbacks"},
    "notebook": MIDDLE | {"xla"},
    # programs, what they build and what they train
    "conf": {"launchers"},  # names the resolver of run folders
    "demo": TALK,
    "components": GROUND | {"logs"},
    "doctor": FEATURES,
    "_application": PARTS | {"doctor"},
    "train": PARTS | {"_application"},
}

BETWEEN_RANKS = {"torch.distributed", "mpi4py"}
TORCH_XLA = {"torch_xla"}
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def sources(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def room_of(path: Path, package: Path = PACKAGE) -> str:
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def imports_of(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, also inside functions and through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + is_package
                base = ".".join([*parts[:keep], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func) in (
            "import_module",
            "importlib.import_module",
            "__import__",
        ):
            if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value
        elif isinstance(node, ast.Attribute) and dotted(node).startswith("torch.distributed"):
            yield node.lineno, dotted(node)


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of names alone, else the empty string; ``ast.unparse`` takes ten times as long."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imports_in(path: Path, package: Path = PACKAGE) -> tuple[tuple[int, str], ...]:
    """What a file of the package imports."""
    return _imports_in(path.read_text(), module_name(path, package), path.name == "__init__.py")


@functools.cache
def _imports_in(source: str, module: str, is_package: bool) -> tuple[tuple[int, str], ...]:
    return tuple(imports_of(ast.parse(source), module, is_package))


def module_name(path: Path, package: Path) -> str:
    name = ".".join(["lightning_lockstep", *path.relative_to(package).with_suffix("").parts])
    return name.removesuffix(".__init__")


def within(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def test_every_room_has_its_row() -> None:
    assert {room_of(path) for path in sources()} <= set(ALLOWED), "a new room needs a row in ALLOWED"


def test_the_rooms_are_layers() -> None:
    """No cycle in the table itself: otherwise it would allow what it is there to forbid."""
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {room for room, may in ALLOWED.items() if room not in done and may <= done}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - done)}"
        done |= ready


def drawn_layers(page: str) -> dict[str, int]:
    """Return the height of each room in the drawing of architecture.md; what is in the lowest row has 0."""
    rows = [re.split(r"\s{3,}", line.strip())[:-1] for line in re.findall(r"^    .+", page, re.MULTILINE)]
    return {
        name.rstrip("/").removesuffix(".py"): height
        for height, row in enumerate(reversed(rows))
        for name in row
    }


def test_the_drawing_of_the_layers_agrees_with_the_table() -> None:
    """What a room may import stands below it; within the lowest row, the ground, any order will do."""
    heights = drawn_layers((Path(__file__).parents[3] / "docs" / "architecture.md").read_text())
    ground = {room for room in ALLOWED if room.startswith("_")} - {"_application"} | {"errors"}
    assert set(ALLOWED) - ground <= set(heights), "a new room needs its place in the drawing"
    assert [
        f"{room} may import {lower}"
        for room in sorted(set(ALLOWED) - ground)
        for lower in sorted(ALLOWED[room])
        if heights.get(lower, 0) >= heights[room]
    ] == []


def upward_imports(package: Path) -> list[str]:
    """Imports that the table does not allow, a line each."""
    wrong = []
    for path in sources(package):
        room = room_of(path, package)
        for line, name in imports_in(path, package):
            if not name.startswith("lightning_lockstep."):
                continue
            target = name.split(".")[1]
            # `from lightning_lockstep import Name` is for users: inside, a name comes from its module.
            if target != room and target not in ALLOWED.get(room, set()):
                wrong.append(f"{path.relative_to(package)}:{line} imports {name}")
    return wrong


def test_imports_flow_one_way() -> None:
    assert upward_imports(PACKAGE) == []


def foreign_private_names(package: Path) -> list[str]:
    """Imports of a name or module with a leading underscore from another room, a line each."""
    return [
        f"{path.relative_to(package)}:{line} imports {name}"
        for path in sources(package)
        for line, name in imports_in(path, package)
        if name.startswith("lightning_lockstep.")
        and name.split(".")[1] != room_of(path, package)
        and any(part.startswith("_") for part in name.split(".")[2:])
        and name.split(".")[1] != "_doors"
    ]


def test_nobody_imports_a_private_name_of_another_room() -> None:
    assert foreign_private_names(PACKAGE) == []


def file_graph(package: Path) -> dict[str, set[str]]:
    """Each module of the package with the modules it imports, for type checkers alone included."""
    files = {module_name(path, package): path for path in sources(package)}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for _, name in imports_in(path, package):
            while name and name not in files:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def test_no_file_imports_in_a_circle() -> None:
    """Not even for type checkers: two files that need each other are one idea, or hide a third."""
    assert circle_in(file_graph(PACKAGE)) == []


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def folder_graph(package: Path) -> dict[str, set[str]]:
    """Each folder below a room's own, or the room, with the folders that its files import.

    An `__init__` only names what its folder offers, so it belongs to no folder; the files at the top of the package
    are rooms by themselves, which `ALLOWED` has.
    """
    files = {module_name(path, package): path for path in sources(package)}
    graph: dict[str, set[str]] = {}
    for module, imported in file_graph(package).items():
        if (folder := folder_of(files[module], package)) is not None:
            others = {folder_of(files[name], package) for name in imported}
            graph.setdefault(folder, set()).update(other for other in others if other not in (None, folder))
    return graph


def folder_of(path: Path, package: Path) -> str | None:
    folder = path.parent.relative_to(package)
    return None if path.name == "__init__.py" or folder == Path(".") else str(folder)


def test_no_folders_import_each_other() -> None:
    """Nor in a longer circle, sub-folders and the folder above them included: they would be one folder."""
    assert circle_in(folder_graph(PACKAGE)) == []


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("failure/record.py", "side_channel.zeromq", True),
        ("side_channel/zeromq.py", "failure.record", False),
        ("mpi/runtime.py", "guard.records", True),
        ("guard/records.py", "mpi.runtime", False),
        ("guard/records.py", "process_group", True),
        ("process_group.py", "guard.records", False),  # the folder above
    ],
)
def test_of_two_folders_only_one_may_import_the_other(
    importer: str, imported: str, is_allowed: bool, tmp_path: Path
) -> None:
    package = copy_of_the_package(tmp_path)
    with open(package / "distributed" / importer, "a") as file:
        file.write(f"\n\ndef planted():\n    import lightning_lockstep.distributed.{imported}\n")
    assert (circle_in(folder_graph(package)) == []) is is_allowed


def copy_of_the_package(folder: Path) -> Path:
    return Path(
        shutil.copytree(PACKAGE, folder / "lightning_lockstep", ignore=shutil.ignore_patterns("*.pyc"))
    )


def test_a_planted_circle_between_two_files_is_found(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    with open(package / "stopping" / "stop_requests.py", "a") as file:
        file.write("\nif TYPE_CHECKING:\n    from lightning_lockstep.stopping.planted import Anything\n")
    (package / "stopping" / "planted.py").write_text(
        "from lightning_lockstep.stopping import stop_requests\n"
    )
    found = circle_in(file_graph(package))
    assert set(found) == {"lightning_lockstep.stopping.stop_requests", "lightning_lockstep.stopping.planted"}


def test_a_planted_upward_import_is_found(tmp_path: Path) -> None:
    package = copy_of_the_package(tmp_path)
    with open(package / "steps" / "isolated.py", "a") as file:
        file.write("\ndef f():\n    from lightning_lockstep.callbacks import OverflowDetector\n")
    (found,) = upward_imports(package)
    assert "steps/isolated.py" in found and "lightning_lockstep.callbacks.OverflowDetector" in found


# Programs of the doctor, which it runs in processes of their own: what they test, they have to import.
PROBES = PACKAGE / "doctor" / "probes"


def used_outside(door: str, roots: set[str], also: str = "") -> str:
    """Where modules below ``roots`` are imported by another room than those that may, a line each.

    The doctor's probes may: they are no part of what trains.
    """
    return "\n".join(
        f"{path.relative_to(PACKAGE)}:{line} uses {name}"
        for path in sources()
        if room_of(path) not in (door, also) and PROBES not in path.parents
        for line, name in imports_in(path)
        if within(name, roots)
    )


def test_only_distributed_talks_between_ranks() -> None:
    # The door to torch looks names up there, and sends nothing.
    assert used_outside("distributed", BETWEEN_RANKS, also="_doors") == ""
    assert used_outside("nowhere", BETWEEN_RANKS), "what is looked for is found where it is allowed"


def test_a_probe_of_the_doctor_is_run_and_not_imported() -> None:
    assert list(PROBES.glob("*.py"))
    importers = [name for path in sources() for _, name in imports_in(path) if ".doctor.probes." in name]
    assert importers == []


def test_only_the_room_of_xla_asks_for_torch_xla() -> None:
    assert used_outside("xla", TORCH_XLA) == ""
    assert used_outside("nowhere", TORCH_XLA), "what is looked for is found where it is allowed"


def test_lightning_comes_through_one_door() -> None:
    assert used_outside("_doors", LIGHTNING) == ""
    stub = PACKAGE / "_doors" / "lightning.pyi"
    assert all(within(name, LIGHTNING) for _, name in imports_in(stub)), "what is looked for is found in it"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("from torch.distributed import all_reduce", "torch.distributed.all_reduce"),
        ("import torch\ndef f(): torch.distributed.barrier()", "torch.distributed.barrier"),
        ("def f():\n    import mpi4py", "mpi4py"),
        ("import importlib\nimportlib.import_module('torch_xla')", "torch_xla"),
        ("from ..errors import LockstepError", "lightning_lockstep.errors.LockstepError"),
        ("from . import sibling", "lightning_lockstep.callbacks.sibling"),
    ],
)
def test_the_reader_sees_every_kind_of_import(source: str, found: str) -> None:
    names = [name for _, name in imports_of(ast.parse(source), "lightning_lockstep.callbacks.some")]
    assert found in names
