"""What must come of the programs beside this file: by the name of what was done, a condition on what each rank saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.models.distributed import local_calls

__all__ = ["BEHAVIOUR", "OPERATIONS", "broken", "guarded"]

#: A condition on what rank 0, rank 1, ... saw.
Holds = Callable[..., bool]
Error = list[str]  # its class and its text


def broken(promises: Mapping[str, Holds], found: Mapping[int, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what does not hold, with what each rank saw of it."""
    seen = {name: [found[rank][name] for rank in sorted(found)] for name in promises}
    return {name: seen[name] for name, holds in promises.items() if not _holds(holds, seen[name])}


def _holds(holds: Holds, seen: list[Any]) -> bool:
    try:
        return holds(*seen)
    except (
        TypeError,
        KeyError,
        IndexError,
        ValueError,
    ):  # a rank had an error where there should be an answer
        return False


def all_are(wanted: Any) -> Holds:
    return lambda *seen: all(one == wanted for one in seen)


def is_error(error: Error, kind: str, *texts: str) -> bool:
    return error[0] == kind and all(text in error[1] for text in texts)


def same_mismatch(zero: Error, one: Error) -> bool:
    texts = ("ranks disagree on collective #", "<- differs", "program_behaviour.py")
    return zero == one and is_error(zero, "CollectiveMismatchError", *texts)


def refused(errors: list[Error], kind: str, texts: list[str]) -> bool:
    return len(errors) == len(texts) and all(map(lambda e, text: is_error(e, kind, text), errors, texts))


def keeps_its_answers(zero: Any, one: Any) -> bool:
    local_calls.check(1, one[0])
    return all(each[1:] == [[6.0, 2.0], True] for each in (zero, one))


WRONG_EVERYWHERE = [
    "device meta",
    "to_dense",
    "to_dense",
    "list of 1 tensors",
    "cannot be reduced",
    "must hold 2 parts",
    "2 were given",
    "split sizes",
]

#: Of program_behaviour.py on two ranks.
BEHAVIOUR: dict[str, Holds] = {
    "future": all_are([[2.0] * 3, True, True, [1.0] * 3]),
    "callbacks": all_are([5.0, 2.0, 2.0, "RuntimeError", 2.0, [1.0, 1.0]]),
    "overlap": all_are([1.0 + 2 * i for i in range(10)]),
    "crosswise": all_are([[2.0, 4.0]]),
    "many_groups": all_are(True),
    "messages": lambda zero, one: zero == [1, [1.0] * 4] and one == [[1.0, 2.0], [3.0], sum(range(300_000))],
    "wrong_message": lambda zero, one: (
        one[0] is None  # as many bytes, of another dtype
        and is_error(
            one[1], "CollectiveMismatchError", "1 elements came from rank 0 of the group, but 3 were"
        )
        and is_error(one[2], "DistBackendError", "receive from 0 of group 'world'", "has sent more")
        and one[3] == [1.0] * 3
    ),
    "wrong_dtype": same_mismatch,
    "wrong_operation": same_mismatch,
    "wrong_splits": lambda zero, one: is_error(
        one, "DistBackendError", "all_to_all_single #1 of group", "make the sizes at both ends equal"
    ),
    "wrong_shape": lambda zero, one: (
        zero == one
        and is_error(zero[0], "CollectiveMismatchError", "(2,)", "(3,)")
        and zero[1] == [2.0, 2.0]  # afterwards the group goes on
    ),
    "wrong_everywhere": lambda *seen: all(refused(one, "ValueError", WRONG_EVERYWHERE) for one in seen),
    "gradients": all_are([True, True, 0.0]),  # those of gloo, and the losses
    "large_of_every_number": all_are([[5]] * 8),
    "inference": all_are([0.0, 1.0]),
    "local": keeps_its_answers,
    "too_late": lambda zero, one: (
        is_error(zero[0], "CollectiveStallError", "all_reduce(sum) #1 of group", "timed out after 0.6 s")
        and zero[1] < 30
        and is_error(zero[2], "DistBackendError", "cannot be used any more")
    ),
    "queued": lambda zero, one: zero == [None] * 3,
    "late_after_a_mismatch": lambda zero, one: (
        is_error(zero[0], "CollectiveStallError", "timed out after 0.6 s") and zero[1] < 1.3
    ),
    "error_in_backward": lambda zero, one: is_error(zero, "RuntimeError", "timed out after 0.6 s over MPI"),
}

#: Of program_operations.py.
OPERATIONS: dict[str, Holds] = {
    "wrong": all_are([]),
    "large": all_are(True),
    "cases": lambda *seen: seen[0] > 400,
    "uneven": lambda *seen: not any(any(one.values()) for one in seen),
    "norms": all_are([]),
    "uneven mismatches": lambda zero, *others: all(
        zero[name] == one[name] and zero[name].startswith("CollectiveMismatchError")
        for name in zero
        for one in others
        if name != "all wrong"
    ),
}

SEEN_BY_THE_GUARD = {"all_reduce", "broadcast", "all_gather", "reduce_scatter"}


def guarded(over_gloo: list[Any]) -> dict[str, Holds]:
    """On two ranks: what each operation gives over gloo, with the guard and without; and the guard saw them end."""
    wanted = json.loads(json.dumps(over_gloo))

    def holds(*seen: Any) -> bool:
        return all(
            plain == wanted[rank] and same and set(operations) >= SEEN_BY_THE_GUARD and outstanding == []
            for rank, (plain, same, operations, outstanding) in enumerate(seen)
        )

    return {"guarded": holds}
