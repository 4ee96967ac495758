"""The decorator for code without a Trainer: call a function with ever smaller batches until one fits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from lightning_lockstep._settings import Faults
from lightning_lockstep.batch_size.memory import attempt, ranks_that_are_full, release_memory
from lightning_lockstep.errors import BatchSizeError

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[[Callable[Concatenate[int, _Given], _Returned]], Callable[_Given, _Returned]]: ...


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, _Given], _Returned],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[_Given, _Returned]: ...


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call a function with a batch size that fits: each time memory runs out, half the size is tried.

    The function's first argument is the batch size; the caller leaves it out. A later call starts with the
    size that worked last.

    Accelerate's function of the same name multiplies by 0.9 after a failure (as of release 1.15). Halving takes
    fewer attempts, but the size found may be as little as half of what would fit. For Accelerate's steps pass a
    ``reduce_batch_size_fn`` that remembers the size and multiplies it by 0.9.

    Args:
        function: What to call.
        starting_batch_size: First size.
        reduce_batch_size_fn: Returns the next size after a failure; by default half the last.

    Returns:
        The function without its first argument.

    Raises:
        BatchSizeError: No size fits. (On every rank.)

    Ranks: all, together. One all-reduce of 4 bytes after each call. When memory runs out on one rank, every
        rank calls again with the smaller size; for this the other ranks must return from the function, so it
        must not leave them waiting in a collective.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=256)
        ... def train(batch_size, model): ...
        >>> train(model)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    faults = Faults()
    faults.whole("starting_batch_size", starting_batch_size, what="a whole number of samples")
    faults.raise_all()
    size = starting_batch_size

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        values: list[Any] = []

        def run() -> None:
            values.append(function(size, *args, **kwargs))

        while ranks_that_are_full(attempt(run), "the function"):
            values.clear()  # this rank may have had room while another had not: its result goes too
            release_memory()
            tried, size = size, reduce_batch_size_fn() if reduce_batch_size_fn is not None else size // 2
            if size < 1:
                size = starting_batch_size
                raise BatchSizeError(
                    f"no batch size fits: memory ran out even with {tried}, the last size to try"
                )
        return values[0]

    return call
