"""What this rank has called lately, kept while it calls on and read from any thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning_lockstep.distributed.guard.calls.call_report import CollectiveCall, call_site
from lightning_lockstep.distributed.guard.calls.recorded import Outstanding, RecordedCall

__all__ = ["CallHistory", "Entry", "GroupHistory"]

# Sends and receives whose handles are kept though nobody has waited for them: a handle holds the tensor.
_OPEN_MESSAGES = 64


class Entry:
    __slots__ = ("_call", "_number", "_site", "_started", "_work", "done")

    def __init__(self, call: CollectiveCall, number: int) -> None:
        self._call, self._number = call, number  # from 1; 0: not counted
        self._started, self._site = time.time(), call_site()
        self._work: Any = None
        self.done = False

    @property
    def described(self) -> CollectiveCall:
        """The call with its number and call site."""
        return replace(self._call, number=self._number, site=self._site)

    @property
    def key(self) -> Outstanding:
        return Outstanding(self._call.group, self._number)

    def recorded(self) -> RecordedCall:
        return RecordedCall(call=self.described, started=self._started, done=self.done)

    def started(self, work: Any) -> None:
        """Note that the backend has it; ``work`` is ``None`` where there is nothing to wait for."""
        if work is None or work.is_completed() or (self._number and not _tells_completion(work)):
            self.done = True
        else:
            self._work = work

    def settle(self) -> bool:
        """Return whether it is complete; lets go of the work handle, and so of the tensors, once it is."""
        if self._work is not None and self._work.is_completed():
            self.done, self._work = True, None
        return self.done


def _tells_completion(work: Any) -> bool:
    """Return whether the handle of a collective ever says that it is complete.

    Gloo's reduce-scatter is an all-reduce whose result is copied by the ``wait`` of a handle that never does.
    """
    try:
        work.get_future()
    except RuntimeError:
        return False
    return True


class CallHistory:
    """The last calls of each group.

    A work handle, which holds the tensors of its operation, is kept until the operation is complete and the history is
    next written or read.
    """

    def __init__(self, length: int) -> None:
        self._length = length  # calls per group
        self._lock = threading.Lock()  # never held while anything is waited for
        self._groups: weakref.WeakSet[GroupHistory] = weakref.WeakSet()
        self._open: list[Entry] = []

    def of_group(self) -> GroupHistory:
        """Return where the calls of one more group go; they are forgotten with it."""
        group = GroupHistory(self, self._length)
        with self._lock:
            self._groups.add(group)
        return group

    def append(self, entry: Entry, entries: deque[Entry]) -> None:
        """Add a call to those of a group."""
        with self._lock:
            self._settle()
            entries.append(entry)
            self._open.append(entry)
            messages = [one for one in self._open if not one.key.number]
            if len(messages) > _OPEN_MESSAGES:
                self._open.remove(messages[0])

    def outstanding(self) -> list[Outstanding]:
        """Return the oldest incomplete collective of each group that has one."""
        with self._lock:
            self._settle()
            keys = [entry.key for entry in self._open]
        oldest: dict[str, Outstanding] = {}
        for key in sorted(key for key in keys if key.number):
            oldest.setdefault(key.group, key)
        return list(oldest.values())

    def messages(self) -> list[RecordedCall]:
        """Return the sends and receives that are not known to be complete, oldest first.

        The handles of gloo say so only once they have been waited for.
        """
        with self._lock:
            self._settle()
            return [entry.recorded() for entry in self._open if not entry.key.number]

    def calls(self) -> list[RecordedCall]:
        """Return the last calls of all groups, oldest first."""
        with self._lock:
            self._settle()
            entries: Iterable[Entry] = [entry for group in self._groups for entry in group.entries]
        return sorted((entry.recorded() for entry in entries), key=lambda recorded: recorded.started)

    def _settle(self) -> None:
        self._open = [entry for entry in self._open if not entry.settle()]


class GroupHistory:
    """The last calls of one group, and how many collectives it has called."""

    def __init__(self, history: CallHistory, length: int) -> None:
        self._history = history
        self.entries: deque[Entry] = deque(maxlen=length)
        self.count = 0  # collectives so far

    def collective(self, call: CollectiveCall) -> Entry:
        self.count += 1
        return self._noted(Entry(call, self.count))

    def uncounted(self, call: CollectiveCall) -> Entry:
        """Note an operation that not all ranks take part in."""
        return self._noted(Entry(call, 0))

    def _noted(self, entry: Entry) -> Entry:
        self._history.append(entry, self.entries)
        return entry
