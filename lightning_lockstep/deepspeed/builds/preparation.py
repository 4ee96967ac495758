"""DeepSpeed's ops built by one rank for all that share its folder, with a message about who builds and who waits.

DeepSpeed compiles an op when it is first used. Left alone, every rank of a node begins to, one gets the lock and the
others wait without a message; a lock that a killed build has left stops every later run forever. Here what the build
needs is looked for first, one rank builds, and what goes wrong there is the same error on every rank.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from lightning_lockstep._console import say
from lightning_lockstep._doors.deepspeed_internals import (
    accelerator_name,
    is_installed_for_this_accelerator,
    is_loaded,
    load_op,
    make_op_builder,
    op_name,
)
from lightning_lockstep._settings import Faults
from lightning_lockstep.deepspeed.builds.locks import (
    BuildLock,
    build_folder,
    find_build_locks,
    remove_stale_locks,
)
from lightning_lockstep.deepspeed.builds.tools import OPS, missing_tools
from lightning_lockstep.deepspeed.builds.wait import Builder, BuildOutcomes, BuildProgress
from lightning_lockstep.deepspeed.importing import cuda_trouble
from lightning_lockstep.deepspeed.shared_folder import mark_of
from lightning_lockstep.distributed.communicator import Communicator
from lightning_lockstep.errors import LaunchError

__all__ = ["BuildLock", "find_build_locks", "prepare_ops", "remove_stale_locks"]

# Builders of these load another op too.
_TOGETHER = {"async_io": ("pin_memory",)}
# How often a lock of another run is looked at [s].
_LOOK_EVERY = 1.0
# Lines of a failed build that are shown.
_SHOWN = 6


def prepare_ops(
    names: Sequence[str],  # keys of tools.OPS, the same on every rank
    communicator: Communicator,
    *,
    remove_stale_locks: bool = False,
    timeout: float = 1800.0,  # of a rank that waits for a build [s]
) -> None:
    """Build DeepSpeed's ops where they are needed, each once for all ranks that share a folder, and load them.

    The ranks of a node share the folder (``TORCH_EXTENSIONS_DIR``, by default below the home directory),
    those of several nodes too where it is on a common file system; the lowest of them builds. It says so when
    it takes longer than some seconds, and the others wait. All ranks call it and raise alike; no collective
    is open while a rank builds.
    """
    builders = _builders_of(names)
    everyone = communicator.gather(_facts(builders, communicator))
    _raise_missing(everyone)
    if any(facts["needs"] for facts in everyone):
        work = _Work(builders, communicator, everyone, remove_stale_locks, timeout)
        _build_once(work)
    fault = _load_all(builders)
    if failed := communicator.agree(bool(fault), fault):
        raise LaunchError(f"DeepSpeed's ops could not be loaded.\n{failed}")


@dataclass
class _Work:
    """What one call has to do, the same on every rank but for ``communicator``."""

    builders: Mapping[str, Any]
    communicator: Communicator
    everyone: Sequence[Mapping[str, Any]]
    may_remove: bool
    timeout: float
    building: dict[int, Builder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        folders: dict[str, list[int]] = {}
        for rank, facts in enumerate(self.everyone):
            folders.setdefault(facts["folder"], []).append(rank)
        for ranks in folders.values():
            facts = self.everyone[ranks[0]]
            self.building[ranks[0]] = Builder(
                ranks[0], facts["host"], facts["pid"], facts["started"], tuple(ranks[1:])
            )

    @property
    def topic(self) -> str:
        return f"deepspeed/build/{self.everyone[0]['token']}"


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


def _facts(builders: Mapping[str, Any], communicator: Communicator) -> dict[str, Any]:
    """Return what the other ranks have to know of this one; nothing is raised before they do."""
    needs = [name for name, builder in builders.items() if _needs_build(builder)]
    missing = missing_tools(needs) if needs else []
    folder = ""
    if needs:
        try:
            folder = mark_of(build_folder(needs[0]).parent)
        except OSError as error:
            missing.append(
                f"No folder can be made for the build ({error}): export TORCH_EXTENSIONS_DIR=/tmp/ops"
            )
    return {
        "host": communicator.host,
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "needs": needs,
        "missing": missing,
        "folder": folder,
        "token": uuid.uuid4().hex,
    }


def _needs_build(builder: Any) -> bool:
    return not is_installed_for_this_accelerator(op_name(builder)) and not is_loaded(builder)


def _raise_missing(everyone: Sequence[Mapping[str, Any]]) -> None:
    by_sentence: dict[str, list[str]] = {}
    for facts in everyone:
        for sentence in facts["missing"]:
            by_sentence.setdefault(sentence, []).append(facts["host"])
    if by_sentence:
        names = ", ".join(next(facts["needs"] for facts in everyone if facts["missing"]))
        lines = [f"  {', '.join(dict.fromkeys(hosts))}: {text}" for text, hosts in by_sentence.items()]
        raise LaunchError(f"DeepSpeed's ops ({names}) cannot be built:\n" + "\n".join(lines))


def _build_once(work: _Work) -> None:
    own = work.building.get(work.communicator.rank)
    outcomes = BuildOutcomes(work.building, work.communicator, work.topic)
    cause = None
    try:
        if own is not None:
            cause = _build(own, work, outcomes)
        outcomes.wait(work.timeout)
    except LaunchError as error:
        raise error from cause
    finally:
        outcomes.close()


def _build(own: Builder, work: _Work, outcomes: BuildOutcomes) -> BaseException | None:
    """Build all ops, send the others the outcome, and return what went wrong."""
    name = ""
    try:
        with BuildProgress(own, work.communicator, work.topic) as progress:
            for name, builder in work.builders.items():
                if _needs_build(builder):
                    _free_of_locks(name, work, progress)
                    progress.doing = f"builds DeepSpeed's op {name} in {build_folder(name)}"
                    load_op(builder)
    except LaunchError as error:
        outcomes.ended(str(error))
        return None
    except BaseException as error:
        outcomes.ended(_failure(own, name, error))
        if not isinstance(error, Exception):
            raise
        return error
    outcomes.ended("")
    return None


def _free_of_locks(name: str, work: _Work, progress: BuildProgress) -> None:
    """Wait until no build of another run is at work on an op; remove what a killed one has left, with consent."""
    ops = (name, *_TOGETHER.get(name, ()))
    root = build_folder(name).parent
    deadline = time.monotonic() + work.timeout
    while locks := find_build_locks(root, ops=ops):
        for lock in remove_stale_locks(work.may_remove, root, ops=ops):
            say(f"lightning-lockstep: removed the lock of a build that was killed: {lock}")
        if time.monotonic() > deadline:
            raise LaunchError(f"Another build still holds its lock after {work.timeout:.0f} s: {locks[0]}")
        if not locks[0].is_stale:
            progress.doing = f"waits for another build of {locks[0]}"
            time.sleep(_LOOK_EVERY)


def _failure(own: Builder, name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower() or "undefined reference" in line]
    shown = "\n  ".join((telling or lines)[:_SHOWN])
    remedy = cuda_trouble(error) if isinstance(error, Exception) else None
    accelerator = "from deepspeed.accelerator import get_accelerator as a"
    whole = f'python -c "{accelerator}; a().create_op_builder({OPS.get(name, "")!r}).load(verbose=True)"'
    after = f"Fix it with: {remedy}" if remedy else f"To see all of its output: {whole}"
    return f"{own} could not build DeepSpeed's op {name} ({type(error).__name__}):\n  {shown}\n{after}"


def _load_all(builders: Mapping[str, Any]) -> str:
    """Load every op here; return what went wrong, or an empty text."""
    return next(filter(None, (_load(name, builder) for name, builder in builders.items())), "")


def _load(name: str, builder: Any) -> str:
    try:
        load_op(builder)
    except Exception as error:  # of a compiler, of the loader, of DeepSpeed: all ranks have to raise it
        return f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return ""
