"""DeepSpeed: whether it can be imported, which operations are built or can be, and how to build them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from lightning_lockstep._text import counted, install_command, plain_table, size_in_words, time_in_words
from lightning_lockstep.doctor.cuda import architectures, find_gpus, torch_build
from lightning_lockstep.doctor.machine import Machine, Probed, release, short, system_install
from lightning_lockstep.doctor.registry import CheckOptions, Finding, not_applicable, ok, problem, warning

_WITH_AIO, _AIO = ("async_io", "pin_memory"), ("libaio-dev", "libaio-devel")  # of Debian and of Red Hat
_PREBUILT = {"cpu_adam": "DS_BUILD_CPU_ADAM", "async_io": "DS_BUILD_AIO", "fused_adam": "DS_BUILD_FUSED_ADAM"}
_LONGEST_BUILD = 600.0  # the lock of a build that runs is never older [s]
_LOCKED_BY_KERNEL = (2, 15)  # from this torch on a lock ends with its process, though its file stays


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    if options.model_parameters is not None:
        yield _memory(machine, options.model_parameters, options.gpus)
    version = machine.python.packages.get("deepspeed")
    if version is None:
        yield not_applicable("DeepSpeed", f"It is not installed: {install_command('deepspeed')}")
        return
    imported = machine.probe("deepspeed_import", timeout=50.0)
    yield _importable(version, imported)
    yield from (missing := list(_missing_tools(machine)))
    yield from _locks(machine)
    if built := imported.entries("built", str):
        yield ok("operations built", ", ".join(built))
    if missing:
        return  # nothing can be built without it
    buildable = [name for name in imported.entries("buildable", str) if name not in built]
    if buildable:
        yield ok("operations buildable", f"{', '.join(buildable)}: compiled when they are first used")
    lacking = [name for name in imported.entries("operations", str) if name not in (*built, *buildable)]
    if names := [name for name in lacking if name in _WITH_AIO]:
        evidence = f"{', '.join(names)} cannot be built here; only offloading to NVMe needs it"
        yield ok("operations", evidence, system_install(*_AIO))
    if names := [name for name in lacking if name not in _WITH_AIO]:
        evidence = f"DeepSpeed finds that {', '.join(names)} cannot be built here; ds_report shows more"
        yield warning("operations", evidence, "lockstep-doctor cuda")
    # DeepSpeed's accelerator for CPUs has builds without CUDA.
    with_cuda = bool(torch_build(machine).cuda) and imported.facts.get("accelerator") != "cpu"
    if ready := [name for name in _PREBUILT if name in buildable]:
        yield _ahead_of_time(version, ready, architectures(find_gpus(machine)) if with_cuda else None)


def _importable(version: str, imported: Probed) -> Finding:
    if imported.error:
        why, _, remedy = imported.error.partition(" Fix it with: ")
        fix = remedy or "pip install --force-reinstall --no-cache-dir --no-deps deepspeed"
        return problem("import", f"DeepSpeed {version} cannot be imported: {why}", fix)
    return ok("import", f"DeepSpeed {version}, accelerator {imported.facts.get('accelerator')}")


def _missing_tools(machine: Machine) -> Iterator[Finding]:
    subject, without = "build tools", "operations cannot be compiled."
    given = machine.environment.get("CXX", "").split()
    compiler = given[0] if given else "c++"
    if machine.which(compiler) is None:
        evidence = f"There is no C++ compiler {compiler!r}: {without}"
        yield warning(subject, evidence, "unset CXX" if given else system_install("g++", "gcc-c++"))
    if machine.which("ninja") is None:
        # Python was started by its path: the programs of its environment are not among those of the shell.
        beside = str(PurePath(machine.python.executable).parent)
        if machine.exists(f"{beside}/ninja"):
            evidence = f"ninja is installed in {beside}, which is not in PATH: {without}"
            yield warning(subject, evidence, f"export PATH={beside}:$PATH")
        else:
            yield warning(subject, f"There is no ninja: {without}", "pip install ninja")
    if not machine.exists(header := f"{machine.python.headers}/Python.h"):
        python = f"python{short(machine.python.version)}"
        fix = system_install(f"{python}-dev", f"{python}-devel")
        yield warning(subject, f"Python's headers are missing ({header}): {without}", fix)


def _locks(machine: Machine) -> Iterator[Finding]:
    """Yield a row for each lock under which torch builds an operation; a killed build leaves its own."""
    if release(machine.python.packages.get("torch")) >= _LOCKED_BY_KERNEL:
        return
    environ, subject = machine.environment, "build locks"
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    root = environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions"
    # One folder for each operation; below torch's own root one more level for the versions of Python and CUDA.
    for path in [*machine.glob(f"{root}/*/lock"), *machine.glob(f"{root}/*/*/lock")]:
        age = machine.age(path)
        if age is None:
            continue  # that build has ended meanwhile
        made = f"{PurePath(path).parent.name} has the lock {path}, made {time_in_words(age)} ago"
        if age > _LONGEST_BUILD:
            evidence = f"A killed build has left its lock, for which every later build waits: {made}"
            yield problem(subject, evidence, f"rm {path}")
        else:
            yield ok(subject, f"a build is running: {made}")


def _ahead_of_time(version: str, names: Sequence[str], kinds: str | None) -> Finding:
    """Return how to build operations before a run; ``kinds`` of GPUs, ``None`` for builds without CUDA."""
    variables = [f"{_PREBUILT[name]}=1" for name in names]
    if kinds is None:
        variables.insert(0, "DS_ACCELERATOR=cpu")
    else:
        variables.append("DS_BUILD_UTILS=1")
    if kinds:
        variables.insert(0, f'TORCH_CUDA_ARCH_LIST="{kinds}"')
    before = " ".join(variables)
    source = f"--no-build-isolation --no-deps --no-cache-dir --no-binary deepspeed deepspeed=={version}"
    return ok(
        "ahead of time",
        f"{', '.join(names)} can be built before a run{f', for GPUs of {kinds}' if kinds else ''}; the wheel serves"
        " many machines of the same kind.",
        f"{before} pip install -v --force-reinstall {source} 2>&1 | tee build.log",
        f"{before} pip wheel -v -w wheels {source} && pip install --no-deps wheels/deepspeed-*.whl",
    )


def _memory(machine: Machine, parameters: float, gpus: int | None) -> Finding:
    ranks = gpus or max(1, len(find_gpus(machine)))
    table = estimate_table(parameters=int(parameters), ranks=ranks, ranks_per_node=ranks)
    on = counted(ranks, "rank")
    return ok("memory per stage", f"{parameters:,.0f} parameters, {on}, without activations:\n{table}")


# -- How much memory the states of a model take under each stage of ZeRO --

# DeepSpeed's defaults [bytes]: reduce_bucket_size in bf16, of which it has two whatever the size of the model;
# sub_group_size in float32; buffer_count times buffer_size of offload_param in bf16.
_BUCKETS, _SUB_GROUP, _PARAM_BUFFERS = 2 * 500_000_000, 4 * 1_000_000_000, 2 * 5 * 100_000_000

# A parameter in bf16-mixed under Adam takes 2 bytes for its weight, 2 for its gradient and 4 for the float32 copy of
# that, 4 for its master weight and 8 for the optimizer's state. An offloaded optimizer takes 4 + 4 + 8 of them to the
# host or the disk, and the host has 2 more to send weights and gradients through. Stage 3 copies the gradients of one
# sub-group at a time, and gathers the largest layer (a twentieth of all parameters) in float32; with NVMe the host has
# four buffers of a sub-group.
#
# Not counted: activations, which grow with the batch and are often the most; layers that stage 3 keeps or fetches
# ahead; what CUDA and NCCL take (1 to 2 GiB). DeepSpeed's own estimators know neither stages 0 and 1 nor NVMe.


def _of_rank(parameters: int, ranks: int) -> list[tuple[Any, ...]]:
    """Return stage, offload_optimizer, offload_param; what a rank has on its device, its host and its disk [bytes]."""
    part = -(-parameters // ranks)
    group, layer = min(4 * part, _SUB_GROUP), 4 * _largest(parameters)
    return [
        (0, "none", "none", 20 * parameters, 0, 0),
        (1, "none", "none", 4 * parameters + 16 * part + _BUCKETS, 0, 0),
        (1, "cpu", "none", 4 * parameters + _BUCKETS, 18 * part, 0),
        (2, "none", "none", 2 * parameters + 18 * part + _BUCKETS, 0, 0),
        (2, "cpu", "none", 2 * parameters + _BUCKETS, 18 * part, 0),
        (3, "none", "none", 16 * part + group + _BUCKETS + layer, 0, 0),
        (3, "cpu", "none", 2 * part + _BUCKETS + layer, 18 * part, 0),
        (3, "cpu", "cpu", _BUCKETS + layer, 20 * part, 0),
        (3, "nvme", "cpu", _BUCKETS + layer, 4 * part + 4 * group, 16 * part),
        (3, "nvme", "nvme", _BUCKETS + layer, 2 * part + 4 * group + _PARAM_BUFFERS, 18 * part),
    ]


def _largest(parameters: int) -> int:
    return max(1, parameters // 20)


def estimate_table(parameters: int, ranks: int, ranks_per_node: int) -> str:
    rows = []
    for stage, optimizer, param, device, host, disk in _of_rank(parameters, ranks):
        # While the ranks build the model each has a float32 copy, in stage 3 of the largest layer.
        start = 4 * (_largest(parameters) if stage == 3 else parameters)
        of_node = (ranks_per_node * size for size in (host, start, disk))
        rows.append((stage, optimizer, param, *(size_in_words(size or None) for size in (device, *of_node))))
    places = ("device of a rank", "host of a node", "host at start", "disk of a node")
    return plain_table(("stage", "offload_optimizer", "offload_param", *places), rows)
