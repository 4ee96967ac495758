"""DeepSpeed: whether it can be imported, which operations are built or can be, and how to build them ahead of time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightning_lockstep.doctor.cuda import (
    Toolkit,
    architectures,
    find_gpus,
    install_line,
    toolkit_in_use,
    torch_build,
    with_capabilities,
)
from lightning_lockstep.doctor.machine import Machine, Probed, short, system_install
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

# What an operation is linked with, in addition to Python; those that begin with `fused` are compiled by nvcc.
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
# What is linked: its name, and the package that brings it to Debian and to Red Hat.
_PARTS = {
    "python": ("Python's headers", "python{version}-dev", "python{version}-devel"),
    "openmp": ("OpenMP", "g++", "gcc-c++"),
    "aio": ("libaio", "libaio-dev", "libaio-devel"),
    "cudart": ("CUDA's cudart", "cuda-cudart-dev-{cuda}", "cuda-cudart-devel-{cuda}"),
    "curand": ("CUDA's curand", "libcurand-dev-{cuda}", "libcurand-devel-{cuda}"),
}
_PREBUILT = {"cpu_adam": "DS_BUILD_CPU_ADAM", "async_io": "DS_BUILD_AIO", "fused_adam": "DS_BUILD_FUSED_ADAM"}


@check(
    name="deepspeed",
    summary="importable, operations built or buildable (link tests), stale build locks, memory per stage",
    why="""DeepSpeed compiles its operations when they are first used, in the middle of a run: with a C++ compiler,
    ninja, Python's headers, libraries such as aio, and for GPUs the CUDA toolkit of torch's major version. What is
    missing shows only then, and the lock of a killed build makes every later run wait forever. Operations can be
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
    cuda = torch_build(machine).cuda
    toolkit = toolkit_in_use(machine) if cuda else None
    folders = [toolkit.libraries] if toolkit and toolkit.libraries else []
    with ThreadPoolExecutor(1) as pool:  # the two take some seconds each
        asked = pool.submit(machine.probe, "build_tools", *folders, timeout=50.0)
        imported = machine.probe("deepspeed_import", timeout=50.0)
    tools = asked.result()
    yield _importable(version, imported)
    yield from _tools(tools)
    if built := imported.texts("built"):
        yield ok("operations built", ", ".join(built))
    if tools.error or any("C++ compiler" in sentence for sentence in tools.texts("missing")):
        return  # reported above; nothing else can be tested without it
    # DeepSpeed's accelerator for CPUs has builds without CUDA.
    with_cuda = bool(cuda) and imported.facts.get("accelerator") != "cpu"
    links = tools.facts.get("links")
    errors = {str(part): str(why) for part, why in links.items() if why} if isinstance(links, dict) else {}
    lacks = {
        name: _lacking(name, errors, with_cuda, toolkit)
        for name in imported.texts("operations")
        if name not in built
    }
    yield from _operations(machine, cuda, toolkit, lacks, errors)
    ready = [name for name in _PREBUILT if name in lacks and not lacks[name]]
    if ready:
        yield _ahead_of_time(version, ready, _kinds(machine) if with_cuda else None)


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


def _lacking(
    operation: str, errors: Mapping[str, str], with_cuda: bool, toolkit: Toolkit | None
) -> list[str]:
    """Return what an operation needs and did not link."""
    needs = ["python", *_NEEDS.get(operation, ())]
    lacking = [part for part in needs if part in errors]
    if with_cuda and (operation in _WITH_CUDA or operation.startswith("fused")):
        of_cuda = ["cudart", "curand"] if operation in _WITH_CUDA else ["cudart"]
        lacking += [part for part in of_cuda if part in errors or toolkit is None]
    return lacking


def _operations(
    machine: Machine,
    cuda: str,
    toolkit: Toolkit | None,
    lacks: Mapping[str, Sequence[str]],
    errors: Mapping[str, str],
) -> Iterator[Finding]:
    buildable = [name for name, lacking in lacks.items() if not lacking]
    if buildable:
        yield ok("operations buildable", f"{', '.join(buildable)}: compiled when they are first used")
    versions = {"version": short(machine.python.version), "cuda": short(cuda).replace(".", "-")}
    for part in dict.fromkeys(part for lacking in lacks.values() for part in lacking):
        names = ", ".join(name for name, lacking in lacks.items() if part in lacking)
        label, *packages = _PARTS[part]
        why = errors.get(part, "no toolkit is found")
        evidence = f"{names} cannot be built, since a program with {label} does not link: {why}"
        fix = system_install(machine, *(name.format(**versions) for name in packages))
        if part in ("cudart", "curand") and toolkit is None:
            fix = install_line(cuda, machine)
        yield warning("operations", evidence, fix)


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
