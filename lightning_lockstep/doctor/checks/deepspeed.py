"""DeepSpeed: whether it can be imported, which operations are built or can be, and how to build them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_lockstep.doctor.cuda import architectures, find_gpus, torch_build
from lightning_lockstep.doctor.machine import Machine, Probed, system_install
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    Status,
    not_applicable,
    ok,
    problem,
    warning,
)

_WITH_AIO, _AIO = ("async_io", "pin_memory"), ("libaio-dev", "libaio-devel")  # of Debian and of Red Hat
_PREBUILT = {"cpu_adam": "DS_BUILD_CPU_ADAM", "async_io": "DS_BUILD_AIO", "fused_adam": "DS_BUILD_FUSED_ADAM"}


WHY = """
DeepSpeed compiles its operations when they are first used, in the middle of a run: with a C++ compiler, ninja,
Python's headers, libraries such as aio, and for GPUs the CUDA toolkit of torch's major version. What is missing shows
only then, and the lock of a killed build makes every later run wait forever. Operations can be built ahead of time,
for all kinds of GPUs at once, and as one wheel for many machines.
"""


def check(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Look at DeepSpeed and at what its builds need."""
    if options.model_parameters is not None:
        yield _memory(machine, options.model_parameters, options.gpus)
    version = machine.python.packages.get("deepspeed")
    if version is None:
        yield not_applicable("DeepSpeed", "It is not installed: pip install 'lightning-lockstep[deepspeed]'")
        return
    imported = machine.probe("deepspeed_import", timeout=50.0)
    tools = machine.probe("build_tools", timeout=10.0)
    yield _importable(version, imported)
    yield from _tools(tools)
    if built := imported.texts("built"):
        yield ok("operations built", ", ".join(built))
    if tools.error or tools.texts("missing"):
        return  # reported above; nothing can be built without it
    buildable = [name for name in imported.texts("buildable") if name not in built]
    if buildable:
        yield ok("operations buildable", f"{', '.join(buildable)}: compiled when they are first used")
    lacking = [name for name in imported.texts("operations") if name not in (*built, *buildable)]
    for names, fix in (
        ([name for name in lacking if name in _WITH_AIO], system_install(machine, *_AIO)),
        ([name for name in lacking if name not in _WITH_AIO], "lockstep-doctor cuda"),
    ):
        if names:
            evidence = f"DeepSpeed finds that {', '.join(names)} cannot be built here; ds_report shows more"
            yield warning("operations", evidence, fix)
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


def _tools(tools: Probed) -> Iterator[Finding]:
    if tools.error:
        yield problem(
            "build tools",
            f"The test of them failed: {tools.error}",
            "lockstep-doctor deepspeed --timeout 120",
        )
        return
    for sentence in tools.texts("missing"):
        evidence, _, remedies = sentence.rpartition(": ")
        fix, *others = remedies.split(", or ")
        evidence = f"{evidence or sentence}: operations cannot be compiled."
        yield warning("build tools", evidence, fix, *(f"# or: {other}" for other in others))
    for lock in tools.tables("locks"):
        if lock.get("is_stale"):
            evidence = "A killed build has left its lock, for which every later build waits:"
            yield problem("build locks", f"{evidence} {lock.get('text')}", f"rm {lock.get('path')}")
        else:
            yield ok("build locks", f"a build is running: {lock.get('text')}")


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
    return Finding(
        Status.OK,
        "ahead of time",
        f"{', '.join(names)} can be built before a run{f', for GPUs of {kinds}' if kinds else ''}; the wheel serves"
        " many machines of the same kind.",
        (
            f"{before} pip install -v --force-reinstall {source} 2>&1 | tee build.log",
            f"{before} pip wheel -v -w wheels {source} && pip install --no-deps wheels/deepspeed-*.whl",
        ),
    )


def _memory(machine: Machine, parameters: float, gpus: int | None) -> Finding:
    from lightning_lockstep.deepspeed.memory_estimate import estimate_table

    ranks = gpus or max(1, len(find_gpus(machine)))
    table = estimate_table(parameters=int(parameters), ranks=ranks, ranks_per_node=ranks)
    on = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return ok("memory per stage", f"{parameters:,.0f} parameters, {on}, without activations:\n{table}")
