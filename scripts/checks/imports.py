"""Imports within the package flow one way, and what few rooms may import stays there."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from repository import PACKAGE, ROOT, at, imports, module_name

GROUND = {"errors", "_lightning", "_registry", "_settings", "_system", "_text", "_trainer"}
TALK = GROUND | {"distributed"}
MIDDLE = TALK | {"launchers", "loaders", "numerics", "steps", "logs"}
FEATURES = MIDDLE | {"overflow", "batch_size", "stragglers", "replicas", "deepspeed", "xla"}
PARTS = FEATURES | {"strategies", "callbacks", "demo", "components", "conf"}

# room (folder or module at the top of the package) -> the rooms it may import; itself always
ALLOWED: dict[str, set[str]] = {
    # at run time only these two; the public names for type checkers
    "__init__": {"_registry"} | FEATURES | {"strategies", "callbacks", "notebook"},
    "_registry": {"_lightning", "errors"},
    "errors": {"_text"},
    "_lightning": {"errors"},
    "_trainer": {"_lightning", "errors"},
    "_settings": {"errors"},
    "_system": {"errors", "_text"},
    "_text": set(),
    "distributed": GROUND,
    "launchers": TALK,
    "numerics": TALK,
    "steps": TALK,
    "logs": TALK,
    "loaders": TALK | {"steps"},
    "overflow": TALK | {"numerics", "steps"},
    "batch_size": TALK | {"loaders", "numerics", "steps"},
    "stragglers": TALK,
    "replicas": TALK | {"numerics", "steps"},
    "deepspeed": TALK | {"numerics", "steps"},
    "xla": TALK | {"numerics", "steps"},
    "strategies": MIDDLE | {"deepspeed", "xla"},
    "callbacks": FEATURES,
    "notebook": MIDDLE | {"xla"},
    # programs, what they build and what they train
    "conf": {"_run_folder"},  # names the resolver of run folders
    "demo": TALK | {"loaders"},
    "components": GROUND | {"logs"},
    "_run_folder": {"_system", "distributed", "launchers", "deepspeed", "errors"},
    "doctor": FEATURES | {"_run_folder"},
    "_application": PARTS | {"doctor", "_run_folder"},
    "train": PARTS | {"_application"},
}
# packages -> the rooms that may import them; the doctor's probes, programs of their own, may in any case
DOORS: dict[tuple[str, ...], tuple[str, ...]] = {
    # The door to torch looks names up there, and sends nothing.
    ("torch.distributed", "mpi4py"): ("distributed", "_lightning"),
    ("torch_xla",): ("xla",),
    ("lightning", "pytorch_lightning", "lightning_fabric"): ("_lightning",),
}
PROBES = PACKAGE / "doctor" / "probes"
DRAWING = ROOT / "docs" / "architecture.md"


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def problems() -> Iterator[str]:
    yield from faults_of_the_table()
    for path, found in imports().items():
        room = room_of(path)
        if room not in ALLOWED:
            yield f"{at(path)}: {room} has no row in ALLOWED of scripts/checks/imports.py"
        for line, name in found:
            if fault := fault_of(path, room, name):
                yield f"{at(path, line)}: {fault}"
    yield from circles()


def fault_of(path: Path, room: str, name: str) -> str:
    """Return what is wrong with an import, if something is."""
    _, *parts = name.split(".")
    if name.startswith("lightning_lockstep."):
        # `from lightning_lockstep import Name` is for users: inside, a name comes from its module.
        if parts[0] != room and parts[0] not in ALLOWED.get(room, set()):
            return f"imports {name}; ALLOWED has {', '.join(sorted(ALLOWED.get(room, [])))} for {room}"
        if parts[0] not in (room, "_lightning") and any(part.startswith("_") for part in parts[1:]):
            return f"imports {name}, a private name of another room"
        # MPI starts once in a rank: the doctor takes the steps of `network_rank` for it in its own process.
        if ".doctor.probes." in name and ".network_rank" not in name:
            return f"imports {name}; a probe is a program, which is run"
    for roots, rooms in DOORS.items():
        may = room in rooms or PROBES in path.parents
        if not may and f"{name}.".startswith(tuple(f"{root}." for root in roots)):
            return f"imports {name}, which only {' and '.join(rooms)} may"
    return ""


def faults_of_the_table() -> Iterator[str]:
    """The table is one of layers, and agrees with the drawing: what a room may import stands below it there."""
    if circle := circle_in(ALLOWED):
        yield f"{at(Path(__file__), 'ALLOWED:')}: a circle in ALLOWED: {' -> '.join(circle)}"
    drawing = re.findall(r"^    .+", DRAWING.read_text(), re.MULTILINE)
    rows = [re.split(r"\s{3,}", line.strip())[:-1] for line in reversed(drawing)]
    heights = {name.rstrip("/").removesuffix(".py"): height for height, row in enumerate(rows) for name in row}
    for room in set(ALLOWED) - GROUND - {"__init__"}:
        if room not in heights:
            yield f"{at(DRAWING, '```text')}: the drawing of the layers has no {room}"
        for lower in ALLOWED[room]:
            if heights.get(lower, 0) >= heights.get(room, 99):
                yield f"{at(DRAWING, f'    {room}')}: {lower} is not drawn below {room}, which may import it"


def circles() -> Iterator[str]:
    """No file imports itself in the end, not even for type checkers; nor a folder, that above it included."""
    files = {module_name(path): path for path in imports()}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for _, name in imports()[path]:
            while name and name not in files:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    # An `__init__` only names what its folder offers, so it belongs to no folder; files at the top are rooms.
    inside = {
        module: str(path.parent.relative_to(ROOT))
        for module, path in files.items()
        if path.name != "__init__.py" and path.parent != PACKAGE
    }
    folders: dict[str, set[str]] = {}
    for module, folder in inside.items():
        folders.setdefault(folder, set()).update({inside.get(name, folder) for name in graph[module]} - {folder})
    for what, found in (("files", circle_in(graph)), ("folders", circle_in(folders))):
        if found:
            place = files[found[0]] if what == "files" else ROOT / found[0]
            yield f"{at(place)}: {what} import each other: {' -> '.join(found)}; join them, or move down what both need"


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []
