"""What one rank called, and the report for ranks that called different things.

Nothing here depends on a backend: whoever compares the ranks describes each call as a :class:`CollectiveCall`,
brings the descriptions together, and raises with :func:`mismatch_report`.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import FrameType
from typing import Any

from lightning_lockstep._tables import plain_table

__all__ = [
    "ALL_TO_ALL",
    "CollectiveCall",
    "call_site",
    "call_title",
    "compares_calls",
    "fingerprint",
    "is_library_file",
    "is_library_module",
    "mismatch_report",
    "site_text",
]

#: What backends call an exchange of parts whose sizes the ranks may choose.
ALL_TO_ALL = ("all_to_all", "all_to_all_single", "alltoall", "alltoall_base")


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective as one rank called it."""

    operation: str  # in torch.distributed, such as ``all_reduce``
    group: str
    number: int = 0  # which collective of the group on this rank, from 1; 0: nobody counts
    dtypes: tuple[str, ...] = ()  # such as ``("float32",)``
    shapes: tuple[tuple[int, ...], ...] = ()
    reduce_op: str | None = None  # such as ``sum``; None: it does not reduce
    root: int | None = None  # sends to all or receives from all, or the peer of a send or receive
    site: str = ""  # where it was called from, such as ``train.py:88 in training_step``
    note: str = ""  # shown instead of the shapes, such as what is wrong with the arguments
    uneven: bool = False  # shapes may differ between ranks, but for their numbers of dimensions

    def to_data(self) -> dict[str, Any]:
        """Return the call as plain data, as JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CollectiveCall:
        """Return the call that :meth:`to_data` has described, also after a way through JSON."""
        known = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        known["dtypes"] = tuple(known.get("dtypes", ()))
        known["shapes"] = tuple(tuple(shape) for shape in known.get("shapes", ()))
        return cls(**known)

    @property
    def title(self) -> str:
        """The operation with its reduction and root, such as ``reduce(sum) to 0``."""
        return call_title(self.operation, self.reduce_op, self.root)

    def compared(self) -> tuple[str, ...]:
        """Return what must be equal on all ranks: operation, dtype and shape, as text, nothing left out."""
        shapes = [len(shape) if self.uneven else tuple(shape) for shape in self.shapes]
        return self.title, str(self.dtypes), self.note or str(shapes)

    def columns(self) -> tuple[str, ...]:
        """Return what the report shows: operation, dtype and shape."""
        shapes = [str(tuple(shape)) for shape in self.shapes]
        return self.title, _in_short(self.dtypes), self.note or _in_short(shapes)


def call_title(operation: str, reduce_op: str | None, root: int | None) -> str:
    """Return how messages name a call, such as ``broadcast from 1``."""
    way = "to" if operation in ("reduce", "gather", "send") else "from"
    return (
        operation + (f"({reduce_op})" if reduce_op else "") + (f" {way} {root}" if root is not None else "")
    )


def mismatch_report(calls: Mapping[int, CollectiveCall]) -> str:
    """Return the text of a :class:`CollectiveMismatchError`: a table of the ranks, and what to do.

    Rows that are not as most are marked.
    """
    columns = {rank: call.columns() for rank, call in calls.items()}
    keys = {rank: call.compared() for rank, call in calls.items()}
    for rank, call in calls.items():
        prefix, suffix = _apart(call, calls.values())
        columns[rank] = (prefix + columns[rank][0] + suffix, *columns[rank][1:])
        keys[rank] = (prefix + keys[rank][0] + suffix, *keys[rank][1:])
    compared = list(keys.values())
    usual = max(compared, key=compared.count)
    rows = [
        (rank, *columns[rank], calls[rank].site, "" if keys[rank] == usual else "<- differs")
        for rank in sorted(calls)
    ]
    table = plain_table(("rank", "operation", "dtype", "shape", "called from", ""), rows)
    return f"ranks disagree on {_which(calls.values())}\n\n{table}\n\n{_remedy(calls, compared)}"


def _apart(call: CollectiveCall, calls: Collection[CollectiveCall]) -> tuple[str, str]:
    """Return what tells a call from others that are of another group, or are another one of their group."""
    prefix = f"#{call.number} " if len({one.number for one in calls}) > 1 and call.number else ""
    suffix = f" in {call.group!r}" if len({one.group for one in calls}) > 1 and call.group else ""
    return prefix, suffix


def _which(calls: Collection[CollectiveCall]) -> str:
    groups, number = {call.group for call in calls}, min(call.number for call in calls)
    if not any(groups):
        return "what they send and receive"
    if len(groups) > 1:
        return "which operation comes next"
    which = f"collective #{number}" if number else "a collective"
    return f"{which} of group {groups.pop()!r}"


def _remedy(calls: Mapping[int, CollectiveCall], compared: Sequence[tuple[str, ...]]) -> str:
    operation, dtype, shape = (len(set(column)) > 1 for column in zip(*compared, strict=True))
    if any(call.note for call in calls.values()):
        return "Make the arguments of the ranks fit together before the call."
    if operation:
        return "Call the same collectives with the same arguments in the same order on every rank."
    first = next(iter(calls.values()))
    if shape and not dtype and first.operation in ALL_TO_ALL:
        return (
            "Let what each rank sends to another be as much as that expects from it (input_split_sizes here,"
            " output_split_sizes there); guard='verify' shows both."
        )
    shapes = "numbers of dimensions" if first.uneven else "shapes"
    what = " and ".join(name for name, differs in (("dtypes", dtype), (shapes, shape)) if differs)
    instead = ""
    if shape and not dtype and first.operation.startswith("all_gather"):
        instead = ", or use lightning_lockstep.gather_uneven()"
    return f"Make the {what or 'arguments'} equal on all ranks before the call{instead}."


def _in_short(texts: Sequence[str]) -> str:
    if len(set(texts)) == 1:
        return texts[0] if len(texts) == 1 else f"{len(texts)} x {texts[0]}"
    return ", ".join(texts[:8]) + (", ..." if len(texts) > 8 else "")


def fingerprint(signature: Hashable) -> int:
    """Return a whole number below 2^63 that stands for what must be equal on all ranks."""
    digest = hashlib.blake2b(repr(signature).encode(), digest_size=8).digest()  # the same in every process
    return int.from_bytes(digest, "big") >> 1


def compares_calls(group: object) -> bool:
    """Return whether a process group compares the calls of its ranks itself, so that nobody else needs to.

    A backend says so by an attribute ``compares_calls`` of its process groups.
    """
    return bool(getattr(group, "compares_calls", False))


_OF_LIBRARIES = {
    *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "hydra", "deepspeed"),
    __name__.partition(".")[0],
}
# Modules whose decorators and context managers stand between a user's call and torch.
_WRAPPERS = {"contextlib", "functools", "typing_extensions"}


def call_site() -> str:
    """Return ``file.py:12 in function`` of the nearest caller outside torch, Lightning and this package.

    ``backward`` where autograd has called it.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.autograd"):
            break
        if not is_library_module(name):
            return site_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return "backward"


def site_text(file: str, line: int, function: str) -> str:
    """Return how messages name a place in a program, such as ``train.py:88 in training_step``."""
    return f"{file.rpartition(os.sep)[2]}:{line} in {function}"


def is_library_module(name: str) -> bool:
    """Return whether a module is torch's, Lightning's or this package's, rather than the user's."""
    return name.partition(".")[0] in _OF_LIBRARIES or name in _WRAPPERS


def is_library_file(path: str) -> bool:
    """Return whether a file is torch's, Lightning's or this package's, rather than the user's."""
    return path.startswith((*_library_folders(), "<frozen"))


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of those libraries that are loaded, and the files of the wrappers."""
    folders = [file.rpartition(os.sep)[0] + os.sep for file in _files(_OF_LIBRARIES)]
    return (*folders, *_files(_WRAPPERS))


def _files(modules: Iterable[str]) -> list[str]:
    loaded = (sys.modules.get(name) for name in modules)
    return [module.__file__ for module in loaded if module is not None and module.__file__]
