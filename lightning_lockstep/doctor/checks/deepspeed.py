"""DeepSpeed: whether it can be imported, which operations are built or can be, and how to build them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_lockstep.doctor.cuda_builds import architectures, find_gpus, torch_build, with_capabilities
from lightning_lockstep.doctor.cuda_toolkits import install_line, short, toolkit_in_use
from lightning_lockstep.doctor.machine import Machine, Probed, system_install
from lightning_lockstep.doctor.registry import (
    CheckOptions,
    Finding,
    Status,
    check,
    not_applicable,
    ok,
    problem,
    warning,
)

# What an operation is linked with, beside Python; those that begin with `fused` are compiled by nvcc.
_NEEDS = {
    "async_io": ("aio",),
    "pin_memory": ("aio",),
    "cpu_adam": ("openmp",),
    "cpu_adagrad": ("openmp",),
    "cpu_lion": ("openmp",),
    "deepspeed_shm_comm": ("openmp",),
}
# Operations whose builds also link CUDA's libraries where torch has CUDA.
_WITH_CUDA = ("cpu_adam", "cpu_adagrad", "cpu_lion")
_PACKAGES = {
    "python": ("python{version}-dev", "python{version}-devel"),
    "openmp": ("g++", "gcc-c++"),
    "aio": ("libaio-dev", "libaio-devel"),
    "cudart": ("cuda-cudart-dev-{cuda}", "cuda-cudart-devel-{cuda}"),
    "curand": ("libcurand-dev-{cuda}", "libcurand-devel-{cuda}"),
}
_LABELS = {
    "python": "Python's headers",
    "openmp": "OpenMP",
    "aio": "libaio",
    "cudart": "CUDA's cudart",
    "curand": "CUDA's curand",
}
_PREBUILT = {"cpu_adam": "DS_BUILD_CPU_ADAM", "async_io": "DS_BUILD_AIO", "fused_adam": "DS_BUILD_FUSED_ADAM"}


@check(
    name="deepspeed",
    summary="importable, operations built or buildable (link tests), stale build locks, memory per stage",
    why="""DeepSpeed compiles its operations when they are first used, in the middle of a run: with a C++ compiler,
    ninja, Python's headers, libraries such as aio, and for GPUs the CUDA toolkit of torch's major version. What is
    missing shows only then, and the lock of a killed build makes every later run wait for ever. Operations can be
    built ahead of time, for all kinds of GPUs at once, and as one wheel for many machines.""",
    timeout=60.0,
)
def check_deepspeed(machine: Machine, options: CheckOptions) -> Iterator[Finding]:
    """Look at DeepSpeed and at what its builds need."""
    if options.model_parameters is not None:
        yield _memory(machine, options.model_parameters, options.gpus)
    version = machine.python.packages.get("deepspeed")
    if version is None:
        yield not_applicable("DeepSpeed", "It is not installed: pip install 'lightning-lockstep[deepspeed]'")
        return
    toolkit = toolkit_in_use(machine) if torch_build(machine).cuda else None
    folders = [toolkit.libraries] if toolkit and toolkit.libraries else []
    with ThreadPoolExecutor(1) as pool:  # the two take some seconds each
        tools = pool.submit(machine.probe, "build_tools", *folders, timeout=50.0)
        imported = machine.probe("deepspeed_import", timeout=50.0)
    yield _importable(version, imported)
    yield from _tools(tools.result())
    yield from _operations(machine, imported, tools.result())
    yield from _ahead_of_time(machine, version, imported, tools.result())


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
    for sentence in _texts(tools.facts, "missing"):
        evidence, _, remedies = sentence.rpartition(": ")
        fix, *others = remedies.split(", or ")
        evidence = f"{evidence or sentence}: operations cannot be compiled."
        yield warning("build tools", evidence, fix, *(f"# or: {other}" for other in others))
    locks = tools.facts.get("locks")
    for lock in locks if isinstance(locks, list) else []:
        if isinstance(lock, dict) and lock.get("is_stale"):
            evidence = (
                f"A killed build has left its lock, for which every later build waits: {lock.get('text')}"
            )
            yield problem("build locks", evidence, f"rm {lock.get('path')}")
        elif isinstance(lock, dict):
            yield ok("build locks", f"a build is running: {lock.get('text')}")


def _operations(machine: Machine, imported: Probed, tools: Probed) -> Iterator[Finding]:
    built, known = _texts(imported.facts, "built"), _texts(imported.facts, "operations")
    if built:
        yield ok("operations built", ", ".join(built))
    if any("C++ compiler" in sentence for sentence in _texts(tools.facts, "missing")):
        return  # reported above; nothing else can be tested without it
    with_cuda = _builds_with_cuda(machine, imported)
    lacks = {name: _lacking(name, machine, tools, with_cuda) for name in known if name not in built}
    buildable = [name for name, lacking in lacks.items() if not lacking]
    if buildable:
        yield ok("operations buildable", f"{', '.join(buildable)}: compiled when they are first used")
    by_reason: dict[str, list[str]] = {}
    for name, lacking in lacks.items():
        for part in lacking:
            by_reason.setdefault(part, []).append(name)
    for part, names in by_reason.items():
        why = _links(tools).get(part) or "no toolkit is found"
        evidence = (
            f"{', '.join(names)} cannot be built, since a program with {_LABELS[part]} does not link: {why}"
        )
        yield warning("operations", evidence, _install(machine, part))


def _builds_with_cuda(machine: Machine, imported: Probed) -> bool:
    """Return whether operations are built for CUDA: DeepSpeed's accelerator for CPUs has builds without it."""
    return bool(torch_build(machine).cuda) and imported.facts.get("accelerator") != "cpu"


def _lacking(operation: str, machine: Machine, tools: Probed, with_cuda: bool) -> list[str]:
    """Return what an operation needs and did not link."""
    links = _links(tools)
    needs = ["python", *_NEEDS.get(operation, ())]
    of_cuda: list[str] = []
    if with_cuda and (operation in _WITH_CUDA or operation.startswith("fused")):
        of_cuda = ["cudart", "curand"] if operation in _WITH_CUDA else ["cudart"]
    if of_cuda and toolkit_in_use(machine) is None:
        return [*(part for part in needs if links.get(part)), *of_cuda]
    return [part for part in [*needs, *of_cuda] if links.get(part)]


def _ahead_of_time(machine: Machine, version: str, imported: Probed, tools: Probed) -> Iterator[Finding]:
    known, built = _texts(imported.facts, "operations"), _texts(imported.facts, "built")
    with_cuda = _builds_with_cuda(machine, imported)
    names = [
        name
        for name in _PREBUILT
        if name in known and name not in built and not _lacking(name, machine, tools, with_cuda)
    ]
    if not names:
        return
    kinds = _kinds(machine) if with_cuda else ""
    variables = [f'TORCH_CUDA_ARCH_LIST="{kinds}"'] if kinds else [] if with_cuda else ["DS_ACCELERATOR=cpu"]
    variables += [f"{_PREBUILT[name]}=1" for name in names] + (["DS_BUILD_UTILS=1"] if with_cuda else [])
    before = " ".join(variables)
    source = f"--no-build-isolation --no-deps --no-cache-dir --no-binary deepspeed deepspeed=={version}"
    yield Finding(
        Status.OK,
        "ahead of time",
        f"{', '.join(names)} can be built before a run{f', for GPUs of {kinds}' if kinds else ''}; the wheel serves"
        " many machines of the same kind.",
        (
            f"{before} pip install -v --force-reinstall {source} 2>&1 | tee build.log",
            f"{before} pip wheel -v -w wheels {source} && pip install --no-deps wheels/deepspeed-*.whl",
        ),
    )


def _kinds(machine: Machine) -> str:
    gpus = find_gpus(machine)
    if any(not gpu.capability for gpu in gpus):
        gpus = with_capabilities(gpus, machine.probe("torch_devices", timeout=50.0))
    return architectures(gpus)


def _memory(machine: Machine, parameters: float, gpus: int | None) -> Finding:
    from lightning_lockstep.deepspeed.memory_estimate import estimate_table

    ranks = gpus or max(1, len(find_gpus(machine)))
    table = estimate_table(parameters=int(parameters), ranks=ranks, ranks_per_node=ranks)
    on = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return ok("memory per stage", f"{parameters:,.0f} parameters, {on}, without activations:\n{table}")


def _install(machine: Machine, part: str) -> str:
    version, cuda = short(machine.python.version), short(torch_build(machine).cuda)
    if part in ("cudart", "curand") and toolkit_in_use(machine) is None:
        return install_line(cuda, machine)
    versions = {"version": version, "cuda": cuda.replace(".", "-")}
    debian, red_hat = (name.format(**versions) for name in _PACKAGES[part])
    return system_install(machine, debian, red_hat)


def _links(tools: Probed) -> Mapping[str, str]:
    links = tools.facts.get("links")
    return {str(name): str(error) for name, error in links.items()} if isinstance(links, dict) else {}


def _texts(facts: Mapping[str, Any], name: str) -> list[str]:
    value = facts.get(name)
    return [str(entry) for entry in value] if isinstance(value, list) else []
