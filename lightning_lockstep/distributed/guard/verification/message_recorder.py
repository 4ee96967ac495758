"""The sends and receives of this rank, which torch's flight recorder does not have over gloo."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch.distributed as dist

from lightning_lockstep.distributed.guard.calls.group_names import group_titles
from lightning_lockstep.distributed.guard.calls.recorded import RecordedCall
from lightning_lockstep.distributed.guard.verification.call_description import GroupIdentity, uncompared
from lightning_lockstep.distributed.guard.verification.call_history import CallHistory, GroupHistory
from lightning_lockstep.distributed.guard.verification.dispatch_hook import (
    POINT_TO_POINT,
    DispatchedCall,
    Finish,
    Hook,
)

__all__ = ["MessageRecorder"]


class MessageRecorder:
    """Notes sends and receives with their handles, until they have been waited for."""

    def __init__(self) -> None:
        self._history = CallHistory(1)
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[GroupIdentity, GroupHistory]] = (
            weakref.WeakKeyDictionary()
        )
        self._hook: Hook | None = None

    def start(self) -> None:
        """Note them from now on; a second call is harmless."""
        if self._hook is None:
            self._hook = Hook(self._before, operators=POINT_TO_POINT)

    def stop(self) -> None:
        """Note nothing more; a second call is harmless."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._groups.clear()

    def messages(self) -> Sequence[RecordedCall]:
        """See :meth:`CallHistory.messages`."""
        return self._history.messages()

    def _before(self, call: DispatchedCall) -> Finish:
        known = self._groups.get(call.group)
        if known is None:
            name = call.group.group_name
            title, ranks = group_titles().get(name, (name, tuple(range(call.group.size()))))
            known = GroupIdentity(title, ranks, call.group.rank()), self._history.of_group()
            self._groups[call.group] = known
        identity, history = known
        return history.uncounted(uncompared(call, identity)).started
