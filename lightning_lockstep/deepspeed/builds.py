"""Operations that DeepSpeed compiles: one rank of a node builds, the others wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_lockstep._doors.deepspeed_internals import (
    accelerator_name,
    is_installed_for_this_accelerator,
    is_loaded,
    load_of_ops,
    load_op,
    make_op_builder,
    op_name,
    put_load_of_ops,
)
from lightning_lockstep._settings import Faults
from lightning_lockstep._text import say
from lightning_lockstep.deepspeed.build_tools import (
    OPS,
    build_folder,
    find_build_locks,
    missing_tools,
    remove_stale_locks,
)
from lightning_lockstep.deepspeed.importing import cuda_trouble
from lightning_lockstep.distributed.coordination.communicator import Communicator
from lightning_lockstep.distributed.coordination.rank_order import in_rank_order
from lightning_lockstep.errors import CollectiveStallError, LaunchError

# -- DeepSpeed's ops built by the first rank of each node, with a message about who builds --
# DeepSpeed compiles an op when it is first used. Left alone, every rank of a node begins to, one gets the
# lock and the others wait without a message; a lock that a killed build has left stops every later run
# forever. Here what the build needs is looked for first, one rank builds, and what goes wrong there is the
# same error on every rank.

# Builders of these load another op too.
_TOGETHER = {"async_io": ("pin_memory",)}
# How often a lock of another run is looked at [s].
_LOOK_EVERY = 1.0
# A build that takes longer is announced [s].
_QUICK = 3.0
# Lines of a failed build that are shown.
_SHOWN = 6


def prepare_ops(
    names: Sequence[str],  # keys of OPS, the same on every rank
    communicator: Communicator,
    *,
    remove_stale_locks: bool = False,
    timeout: float = 1800.0,  # of a wait for another run's build, and for a build of this run [s]
) -> None:
    """Load DeepSpeed's ops on all ranks, built where needed by the first of each node; all raise the same error."""
    # No collective is open while a rank builds.
    builders = _builders_of(names)
    if not builders:
        return
    who = f"rank {communicator.rank} on {communicator.host}"
    is_first = communicator.gather(communicator.host).index(communicator.host) == communicator.rank
    error = None
    try:
        with in_rank_order(per_node=True, timeout=2 * timeout):
            if is_first:
                error = _error_of(lambda: _build(builders, who, remove_stale_locks, timeout))
    except CollectiveStallError as stalled:
        if communicator.side_channel.usable:
            raise
        raise LaunchError("Lost contact with rank 0 while DeepSpeed's ops were being built.") from stalled
    _raise_alike(error, communicator)
    if not is_first:
        error = _error_of(lambda: _load_each(builders, who))
    _raise_alike(error, communicator)


def _builders_of(names: Sequence[str]) -> dict[str, Any]:
    from deepspeed.accelerator import get_accelerator

    faults = Faults("prepare_ops")
    builders = {}
    for name in dict.fromkeys(names):
        if not faults.choice("names", name, list(OPS)):
            continue
        builder = make_op_builder(OPS[name])
        # Where an accelerator lacks an op, that of the CPU gives a builder of nothing.
        if builder is None or op_name(builder) != name:
            accelerator = accelerator_name(get_accelerator())
            faults.add(f"names={name!r}: expected an op of DeepSpeed's accelerator {accelerator!r}.")
        builders[name] = builder
    faults.raise_all()
    return builders


def _error_of(work: Callable[[], object]) -> LaunchError | None:
    try:
        work()
    except LaunchError as error:
        return error
    return None


def _raise_alike(error: LaunchError | None, communicator: Communicator) -> None:
    failed = communicator.agree(error is not None, str(error))
    if failed:
        cause = None if error is None else error.__cause__
        raise LaunchError("\n".join(dict.fromkeys(failed.reasons.values()))) from cause


def _build(builders: Mapping[str, Any], who: str, may_remove: bool, timeout: float) -> None:
    """Load every op here, and build it where that is needed."""
    needed = [name for name, builder in builders.items() if _needs_build(builder)]
    missing = missing_tools(needed) if needed else []
    try:
        folders = {name: build_folder(name) for name in needed}
    except OSError as error:
        missing.append(f"No folder can be made for the build ({error}): export TORCH_EXTENSIONS_DIR=/tmp/ops")
    if missing:
        lines = "\n".join(f"  {who}: {sentence}" for sentence in missing)
        raise LaunchError(f"DeepSpeed's ops ({', '.join(needed)}) cannot be built:\n{lines}")
    for name, builder in builders.items():
        if name not in folders:
            _load(name, builder, who)
            continue
        try:
            _wait_for_other_builds(name, folders[name], may_remove, timeout)
        except OSError as error:  # the lock of another user, a disk that is gone
            raise LaunchError(f"{who} cannot wait for other builds in {folders[name]}: {error}") from error
        building = (
            f"{who} builds DeepSpeed's op {name} in {folders[name]} (all ranks of the node wait for it)"
        )
        announcement = threading.Timer(_QUICK, say, [f"lightning-lockstep: {building}"])
        announcement.daemon = True
        announcement.start()
        try:
            _load(name, builder, who)
        finally:
            announcement.cancel()


def _needs_build(builder: Any) -> bool:
    return not is_installed_for_this_accelerator(op_name(builder)) and not is_loaded(builder)


def _wait_for_other_builds(name: str, folder: Path, may_remove: bool, timeout: float) -> None:
    """Wait until no build of another run is at work on an op; remove what a killed one has left, with consent."""
    ops = (name, *_TOGETHER.get(name, ()))
    deadline = time.monotonic() + timeout
    is_said = False
    while locks := find_build_locks(folder.parent, ops=ops):
        for lock in remove_stale_locks(may_remove, folder.parent, ops=ops):
            say(f"lightning-lockstep: removed the lock of a build that was killed: {lock}")
        if time.monotonic() > deadline:
            raise LaunchError(f"Another build still holds its lock after {timeout:.0f} s: {locks[0]}")
        if not locks[0].is_stale:
            if not is_said:
                say(f"lightning-lockstep: waiting for another build of {locks[0]}")
            is_said = True
            time.sleep(_LOOK_EVERY)


def _load_each(builders: Mapping[str, Any], who: str) -> None:
    for name, builder in builders.items():
        _load(name, builder, who)


def _load(name: str, builder: Any, who: str) -> None:
    try:
        load_op(builder)
    except Exception as error:  # of a compiler, of the loader, of DeepSpeed: all ranks have to raise it
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "undefined reference" in line]
        shown = "\n  ".join((telling or lines)[:_SHOWN])
        remedy = cuda_trouble(error)
        accelerator = "from deepspeed.accelerator import get_accelerator as a"
        whole = f'python -c "{accelerator}; a().create_op_builder({OPS[name]!r}).load(verbose=True)"'
        after = f"Fix it with: {remedy}" if remedy else f"To see all of its output: {whole}"
        raise LaunchError(
            f"{who} could not build DeepSpeed's op {name} ({type(error).__name__}):\n  {shown}\n{after}"
        ) from error


# -- DeepSpeed's ops that a module loads by itself (``DeepSpeedCPUAdam``), built as those of a configuration
# are


@contextmanager
def prepared_where_loaded(prepare: Callable[[list[str]], None]) -> Iterator[None]:
    """Have each op that the body loads prepared by all ranks first."""
    # Left alone, DeepSpeed's optimizers compile their op when they are made: every rank of a node at the same
    # time, without a message, and behind a lock that a killed build may have left. The body loads the same
    # ops in the same order on every rank.
    load = load_of_ops()
    prepared: set[str] = set()
    is_preparing = False
    failed: list[LaunchError] = []

    def prepare_and_load(builder: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_preparing
        # What a build loads by itself is a matter of the rank that builds.
        name = op_name(builder)
        if not is_preparing and name in OPS and name not in prepared:
            is_preparing = True
            try:
                prepare([name])
            except LaunchError as error:
                failed.append(error)
                raise
            finally:
                is_preparing = False
            prepared.add(name)
        return load(builder, *args, **kwargs)

    put_load_of_ops(prepare_and_load)
    try:
        yield
    except Exception as error:
        within = next((one for one in _causes(error) if one in failed), error)
        if within is error:
            raise
        raise within from None  # DeepSpeed's optimizers hide it behind another error
    finally:
        put_load_of_ops(load)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those from which it was raised."""
    known: BaseException | None = error
    while known is not None:
        yield known
        known = known.__cause__
