"""One collective as a rank called it: its call site, what must be equal on all ranks, the report of a mismatch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from traceback import walk_stack
from typing import Any

from lightning_lockstep._text import plain_table
from lightning_lockstep.distributed.failure.record import own_place, places_in_words
from lightning_lockstep.distributed.failure.tracebacks import LIGHTNING, package_of
from lightning_lockstep.errors import CollectiveMismatchError

# -- What one rank called --

#: The names that backends give to an all-to-all, in which the ranks may choose the size of each part.
ALL_TO_ALL = ("all_to_all", "all_to_all_single", "alltoall", "alltoall_base")


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective as one rank called it."""

    operation: str  # its name in torch.distributed, such as ``all_reduce``
    group: str
    number: int = 0  # of the call in its group on this rank, from 1; 0 if nobody counts
    dtypes: tuple[str, ...] = ()  # such as ``("float32",)``
    shapes: tuple[tuple[int, ...], ...] = ()
    reduce_op: str | None = None  # such as ``sum``; None if it does not reduce
    root: int | None = None  # the rank that sends to all or receives from all
    site: str = ""  # where it was called from, such as ``train.py:88 in training_step``
    note: str = ""  # shown in place of the shapes, for example what is wrong with the arguments
    uneven: bool = False  # whether shapes may differ between ranks; numbers of dimensions may not
    batch: str = ""  # of the fit in which it was called, such as ``epoch 0, batch 3``
    # Epoch, step, batch and stage of this rank's Trainer; they are not compared.
    where: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CollectiveCall:
        """Return the call from the data of ``asdict``, also if JSON has made lists of its tuples."""
        return cls(**{**data, "dtypes": tuple(data["dtypes"]), "shapes": tuple(map(tuple, data["shapes"]))})

    @property
    def title(self) -> str:
        """The operation with its reduction and root, such as ``reduce(sum) to 0``."""
        way = "to" if self.operation in ("reduce", "gather") else "from"
        root = "" if self.root is None else f" {way} {self.root}"
        return self.operation + (f"({self.reduce_op})" if self.reduce_op else "") + root

    def to_bytes(self) -> bytes:
        """Return the call as JSON, with the place of this rank's Trainer."""
        return json.dumps({**asdict(self), "where": own_place()}).encode()

    def compared(self) -> tuple[str, ...]:
        """Return what must be equal on all ranks, as text: operation, dtypes and shapes in full."""
        shapes = [len(shape) if self.uneven else tuple(shape) for shape in self.shapes]
        return self.title, str(self.dtypes), self.note or str(shapes)

    def columns(self) -> tuple[str, ...]:
        """Return what the report shows: operation, dtypes and shapes, shortened."""
        shapes = [str(tuple(shape)) for shape in self.shapes]
        return self.title, _in_short(self.dtypes), self.note or _in_short(shapes)


def fingerprint(signature: Hashable) -> int:
    """Return a hash, below 2^63, of what must be equal on all ranks."""
    digest = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()  # the same in every process
    return int.from_bytes(digest, "big") >> 1


# -- The report of a mismatch: a table of the ranks' calls, and what to do --


def mismatch(ranks: Sequence[int], calls: Sequence[bytes]) -> CollectiveMismatchError:
    """Return the error that all ranks raise, given what each has made of its call by :meth:`to_bytes`."""
    made = (CollectiveCall.from_data(json.loads(call)) for call in calls)
    return CollectiveMismatchError(mismatch_report(dict(zip(ranks, made, strict=True))))


def mismatch_report(calls: Mapping[int, CollectiveCall]) -> str:
    """Return the text of a :class:`CollectiveMismatchError`; calls that differ from the majority are marked."""
    odd, rows = odd_ones(calls), []
    for rank in sorted(calls):
        call = calls[rank]
        operation, dtype, shape = call.columns()
        # The other ranks may be in another group, or in another call of the same group.
        if call.number and len({one.number for one in calls.values()}) > 1:
            operation = f"#{call.number} {operation}"
        if call.group and len({one.group for one in calls.values()}) > 1:
            operation = f"{operation} in {call.group!r}"
        rows.append((rank, operation, dtype, shape, call.site, "<- differs" if rank in odd else ""))
    table = plain_table(("rank", "operation", "dtype", "shape", "called from", ""), rows)
    places = places_in_words({rank: call.where for rank, call in calls.items()})
    paragraphs = f"ranks disagree on {_which(calls.values())}", table, places, _remedy(calls)
    return "\n\n".join(filter(None, paragraphs))


def odd_ones(calls: Mapping[int, CollectiveCall]) -> tuple[int, ...]:
    keys = {rank: _compared_in_group(call) for rank, call in calls.items()}
    counts = Counter(keys.values())
    # A call whose root is not known agrees with calls of any root.
    agreeing = ({keys[rank], _compared_in_group(replace(call, root=None))} for rank, call in calls.items())
    usual = max(agreeing, key=lambda those: sum(counts[one] for one in those))
    return tuple(rank for rank, key in keys.items() if key not in usual)


def _compared_in_group(call: CollectiveCall) -> Hashable:
    return *call.compared(), call.group, call.number, call.batch


def _which(calls: Collection[CollectiveCall]) -> str:
    groups, number = {call.group for call in calls}, min(call.number for call in calls)
    if len(groups) > 1:
        return "which operation comes next"
    which = f"collective #{number}" if number else "a collective"
    if _only_batches_differ(calls):
        which = f"the batch of {which}"
    return f"{which} of group {groups.pop()!r}"


def _only_batches_differ(calls: Collection[CollectiveCall]) -> bool:
    of_calls = {(*call.compared(), call.group, call.number) for call in calls}
    return len(of_calls) == 1 and len({call.batch for call in calls}) > 1


def _by_fsdp(calls: Mapping[int, CollectiveCall]) -> bool:
    """Return whether FSDP made one of the calls; only FSDP calls an all-gather in backward."""
    gathers = (call for call in calls.values() if call.operation.startswith("all_gather"))
    return any(call.site.endswith(_FSDP) for call in calls.values()) or BACKWARD in {c.site for c in gathers}


def _remedy(calls: Mapping[int, CollectiveCall]) -> str:
    if any(call.note for call in calls.values()):
        return "Make the arguments of the ranks fit together before the call."
    first = next(iter(calls.values()))
    sites = {call.site for call in calls.values()}
    is_same = len({(call.group, call.number) for call in calls.values()}) == 1
    titles, dtypes, shapes = map(set, zip(*(c.compared() for c in calls.values()), strict=True))
    if _only_batches_differ(calls.values()):
        return "In each batch, run as many backward passes and call as many collectives on every rank."
    is_elsewhere = is_same and len(sites) > 1 and all(sites) and not first.uneven
    if _by_fsdp(calls):
        return (
            "FSDP has divided the model, so each call of a layer is an all_gather, and so is its backward: call the"
            " model equally often and in the same order on all ranks, also in evaluations, and even if only one rank"
            " logs, samples or saves."
        )
    if not is_same or len(titles) > 1 or (is_elsewhere and BACKWARD in sites):
        return (
            "Call the same collectives with the same arguments in the same order on every rank. Look for an `if` or a"
            " loop that only some ranks enter, or for a backward that only some have run."
        )
    if sites == {BACKWARD}:
        return (
            "DDP averages gradients in backward, but the ranks have brought different ones: give every rank as many"
            " backward passes, losses that depend on the same parameters, and the same bucket_cap_mb."
        )
    dtype, shape = len(dtypes) > 1, len(shapes) > 1
    if shape and not dtype and first.operation in ALL_TO_ALL:
        return "Let each rank send as much as the other one expects (input_split_sizes here, output_split_sizes there)."
    kinds = (("dtypes", dtype), ("numbers of dimensions" if first.uneven else "shapes", shape))
    what = " and ".join(name for name, differs in kinds if differs)
    instead = ""
    if shape and not dtype and first.operation.startswith("all_gather"):
        instead = ", or use lightning_lockstep.gather_uneven()"
    if is_elsewhere:  # the ranks may as well be in two branches that each make a call
        instead += ", or look for a call that only some ranks make"
    return f"Make the {what or 'arguments'} equal on all ranks before the call{instead}."


def _in_short(texts: Sequence[str]) -> str:
    counts = [f"{count} x {text}" if count > 1 else text for text, count in Counter(texts).items()]
    return ", ".join(counts[:8]) + (", ..." if len(counts) > 8 else "")


# -- The batch of a fit in which a call was made, which must be equal on all ranks too --

_trains: threading.Thread | None = None  # the thread that trains
_batch: Callable[[], str] = str


def tell_batch_by(function: Callable[[], str]) -> None:
    """Ask ``function`` for the batch of each call; call this in the thread that trains."""
    global _trains, _batch
    _trains, _batch = threading.current_thread(), function


def batch_of_call() -> str:
    """Return the batch to which a collective of the calling thread belongs, or an empty text if there is none."""
    thread = threading.current_thread()
    # Threads of autograd and gloo, which Python names "Dummy-...", and those that complete futures of the backend
    # "mpi4py" belong to the batch, because the same callback may run there on one rank and in the thread that trains
    # on another. Threads of the user's program may be ahead or behind.
    return _batch() if thread is _trains or thread.name.startswith(("Dummy-", "lockstep-mpi")) else ""


@functools.lru_cache(4)  # because it is called for each collective
def batch_number(batch: str) -> int:
    """Return a hash, below 2^63, of a batch; it is combined with the hash of a call."""
    return fingerprint(batch)


# -- The call site: the nearest place in the user's own program --

# The files from which Python starts a backward; `Function.apply`, which a forward calls, is in another one.
_ENGINE = tuple(f"{os.sep}torch{os.sep}autograd{os.sep}{name}.py" for name in ("graph", "__init__"))
_TRAINER = f"{os.sep}pytorch{os.sep}trainer{os.sep}trainer.py"
#: The call site of collectives that autograd calls.
BACKWARD = "backward"
# The call site of what FSDP calls for a layer is the call of that layer, followed by this.
_FSDP, _FSDP_FILES = " (FSDP)", f"{os.sep}torch{os.sep}distributed{os.sep}fsdp{os.sep}"


def call_site() -> str:
    """Return :func:`nearest_site` of the caller."""
    frames = walk_stack(sys._getframe(1))
    return nearest_site(((f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames), BACKWARD)


def nearest_site(places: Iterable[tuple[str, int, str]], otherwise: str) -> str:
    """Return the nearest place in the user's program, or ``otherwise``; ``places`` has the innermost first."""
    # A call that the Trainer makes by itself gets the innermost place in Lightning, because the user's
    # `trainer.fit()` would be the same place for all such calls.
    inside = by = ""
    for file, line, function in places:
        if file.endswith(_ENGINE):
            return BACKWARD
        if file.endswith(_TRAINER) and inside:
            break
        package = package_of(file)
        if package is None:
            return site_text(file, line, function) + by
        by = _FSDP if _FSDP_FILES in file else by
        if not inside and package in LIGHTNING:
            inside = site_text(file, line, function)
    return inside + by if inside else otherwise


def site_text(file: str, line: int, function: str) -> str:
    """Return a place in a program as messages show it, such as ``train.py:88 in training_step``."""
    return f"{file.rpartition(os.sep)[2]}:{line} in {function}"
