"""Operations that DeepSpeed compiles: one rank of a node builds, the others wait."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psutil

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
from lightning_lockstep._text import ranks_in_words, say, time_in_words
from lightning_lockstep.deepspeed.build_tools import (
    OPS,
    build_folder,
    find_build_locks,
    missing_tools,
    remove_stale_locks,
)
from lightning_lockstep.deepspeed.engine import mark_of
from lightning_lockstep.deepspeed.importing import cuda_trouble
from lightning_lockstep.distributed.coordination.communicator import Communicator
from lightning_lockstep.distributed.side_channel.channel import Message
from lightning_lockstep.errors import LaunchError

# -- How ranks wait for those that build: with a line now and then, for a limited time, and not for exited
# processes

# How often a building rank shows that it is alive [s].
_BEAT = 5.0
# A building rank that has sent no message for so long counts as lost [s].
_SILENCE = 90.0
# When the first line about a build is printed, and how long until the next [s].
_FIRST_LINE = 3.0
_NEXT_LINE = 15.0


@dataclass(frozen=True)
class Builder:
    """A rank that builds, for those that share its folder."""

    rank: int
    host: str
    pid: int
    started: float  # when its process did, to tell it from a later one of its number [s since 1970]
    for_ranks: tuple[int, ...] = ()  # the others that wait for it

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    def is_alive(self) -> bool:
        """Return whether its process runs; only right on its host."""
        try:
            process = psutil.Process(self.pid)
            ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return process.status() not in ended and abs(process.create_time() - self.started) < 1.0
        except psutil.Error:
            return False


class BuildProgress:
    """Shows, while its body runs, that a building rank is alive: to the other ranks, and to the user."""

    def __init__(self, builder: Builder, communicator: Communicator, topic: str) -> None:
        self.doing = "prepares DeepSpeed's ops"  # now, for the user
        self._builder, self._channel, self._topic = builder, communicator.side_channel, topic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-build", daemon=True)

    def __enter__(self) -> BuildProgress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        began = last_beat = time.monotonic()
        next_line = began + _FIRST_LINE
        while not self._over.wait(1.0):
            now = time.monotonic()
            if now - last_beat >= _BEAT:
                last_beat = now
                self._channel.post(self._topic, {"beat": True})
            if now >= next_line:
                next_line = now + _NEXT_LINE
                say(f"lightning-lockstep: {self._line(now - began)}")

    def _line(self, seconds: float) -> str:
        waiting = self._builder.for_ranks
        verb = "waits" if len(waiting) == 1 else "wait"
        wait = f"; {ranks_in_words(waiting)} {verb} for it" if waiting else ""
        return f"{self._builder} {self.doing} ({time_in_words(seconds)} so far){wait}"


class BuildOutcomes:
    """Collects how the builds of all building ranks ended."""

    def __init__(self, builders: Mapping[int, Builder], communicator: Communicator, topic: str) -> None:
        self._builders, self._communicator, self._topic = builders, communicator, topic
        self._news = threading.Condition()
        self._ended: dict[int, str] = {}
        now = time.monotonic()
        self._last_message = dict.fromkeys(builders, now)
        # Those whose processes this rank can see: they are on its host, and in the same container.
        self._watched = [
            builder
            for builder in builders.values()
            if builder.host == communicator.host and builder.is_alive()
        ]
        self._remove = communicator.side_channel.on(topic, self._take)

    def ended(self, fault: str) -> None:  # why it failed; empty: it did not
        """Tell all ranks how this rank's own build ended."""
        channel = self._communicator.side_channel
        with self._news:
            self._ended[self._communicator.rank] = fault
        channel.post(self._topic, {"fault": fault})
        if fault:
            channel.flush()  # this rank is about to end

    def wait(self, timeout: float) -> None:  # [s]
        """Wait until every build has ended well; a failure, or the end of its rank, is raised at once."""
        channel = self._communicator.side_channel
        with self._news:
            arrived = channel.wait_for(
                self._news, lambda: bool(self._faults()) or not self._missing(), timeout
            )
            faults, missing = self._faults(), self._missing()
        if faults:
            raise LaunchError(faults[0])
        if not arrived:
            names = ", ".join(str(self._builders[rank]) for rank in missing)
            if not channel.usable:
                raise LaunchError(f"Lost contact with {names} while it was building DeepSpeed's ops.")
            raise LaunchError(f"{names} did not finish building DeepSpeed's ops within {timeout:.0f} s.")

    def close(self) -> None:
        self._remove()

    def _take(self, message: Message) -> None:
        body: dict[str, Any] = message.body
        with self._news:
            self._last_message[message.sender] = time.monotonic()
            if "fault" in body:
                self._ended[message.sender] = body["fault"]
            self._news.notify_all()

    def _missing(self) -> list[int]:
        return [rank for rank in self._builders if rank not in self._ended]

    def _faults(self) -> list[str]:
        faults = [fault for _, fault in sorted(self._ended.items()) if fault]
        return faults or [text for rank in self._missing() if (text := self._lost(rank))]

    def _lost(self, rank: int) -> str | None:
        builder = self._builders[rank]
        if rank == self._communicator.rank:
            return None
        if builder in self._watched and not builder.is_alive():
            return f"{builder} exited while building DeepSpeed's ops (process {builder.pid}); its own output shows why."
        if time.monotonic() - self._last_message[rank] > _SILENCE:
            return f"{builder}, which builds DeepSpeed's ops, has sent no message for {_SILENCE:.0f} s."
        return None


# -- DeepSpeed's ops built by one rank for all that share its folder, with a message about who builds and
# who waits
#
# DeepSpeed compiles an op when it is first used. Left alone, every rank of a node begins to, one gets the
# lock and the others wait without a message; a lock that a killed build has left stops every later run
# forever. Here what the build needs is looked for first, one rank builds, and what goes wrong there is the
# same error on every rank.

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
    failed: list[LaunchError] = []
    is_preparing = False

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
        within = next((one for one in _causes(error) if one in failed), None)
        if within is None or within is error:
            raise
        raise within from None
    finally:
        put_load_of_ops(load)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those from which it was raised."""
    known: BaseException | None = error
    while known is not None:
        yield known
        known = known.__cause__
