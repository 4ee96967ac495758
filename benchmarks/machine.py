"""What a reader must know of the machine to make sense of a figure."""

from __future__ import annotations

import ast
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
#: What each page in `results/` measures, below the package.
MEASURED = {
    "batch_size": ("batch_size", "callbacks/auto_batch_size.py"),
    "by_sample": (
        "steps",
        "loaders/global_order.py",
        "distributed/coordination/global_norm.py",
        "strategies/counted_steps.py",
    ),
    "cuda": ("",),
    "deepspeed": ("deepspeed", "strategies"),
    "early_stopping": ("callbacks/early_stopping.py", "distributed/coordination"),
    "failures": ("distributed/failure", "distributed/guard", "launchers", "replicas", "overflow"),
    "fsdp": ("distributed/sharding.py", "strategies"),
    "gather_uneven": ("distributed/coordination/gather_uneven.py",),
    "guard": ("distributed/guard",),
    "logging": ("logs",),
    "mpi": ("distributed/mpi",),
    "overflow": ("overflow", "steps", "callbacks/overflow_detector.py"),
    "recovery": ("distributed/failure", "launchers/outliving.py", "strategies/outliving"),
    "replica_check": ("replicas", "callbacks/replica_check.py"),
    "same_run": ("loaders", "strategies"),
    "scale": ("distributed/side_channel", "distributed/failure"),
    "soak": ("distributed/failure", "distributed/guard", "distributed/side_channel", "launchers"),
    "step": ("strategies", "distributed/ddp_reducer.py"),
    "stopping": ("callbacks/stop_together.py", "distributed/coordination"),
    "stragglers": ("stragglers.py", "callbacks/straggler_monitor.py"),
    "verify": ("distributed/guard",),
    "xla": ("xla", "strategies"),
}
_PACKAGES = ("torch", "lightning", "numpy", "mpi4py", "accelerate", "transformers", "torch-xla")


def facts(quick: bool) -> dict[str, str]:
    """Machine, versions and circumstances, as label to text."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "measured": datetime.date.today().isoformat() + (" (quick: too few rounds to quote)" if quick else ""),
        "commit": commit(),
        "processor": f"{_processor()}, {usable} usable cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerator": _accelerator(),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(f"{name} {version}" for name, version in _versions()),
        "load at the end (1, 5, 15 min)": load,
    }


def commit() -> str:
    """The commit that is measured; what was not committed counts as a change since."""
    return _git("rev-parse", "--short=8", "HEAD").stdout.strip() or "unknown"


def has_changed(topic: str, since: str) -> bool | None:
    """Whether the code that a page measures is other than at a commit; ``None`` if this checkout lacks that commit."""
    parts = (f"lightning_lockstep/{part}" for part in MEASURED[topic])
    files = _git("diff", "--name-only", "--no-renames", since, "--", *parts)
    if files.returncode:
        return None
    for path in map(Path(ROOT).joinpath, files.stdout.splitlines()):
        before = _git("show", f"{since}:{path.relative_to(ROOT)}").stdout
        if _without_words(before) != _without_words(path.read_text() if path.exists() else ""):
            return True
    return False


def _without_words(text: str) -> str:
    """Return code without comments and docstrings, which change no figure; what is not Python as it is."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = node.body[ast.get_docstring(node) is not None :]
    return ast.dump(tree)


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _accelerator() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _versions() -> list[tuple[str, str]]:
    import lightning_lockstep

    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    theirs = [(name, importlib.metadata.version(name)) for name in _PACKAGES if name in installed]
    # From the module: run from the repository, it is the source tree that was measured.
    return [("lightning-lockstep", lightning_lockstep.__version__), *theirs]
