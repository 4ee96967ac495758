"""The decorator for code without a Trainer: call a function with ever smaller batches until one fits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from lightning_lockstep.batch_size.memory import Failure, attempt, release_memory
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import BatchSizeError, ConfigurationError

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
        TypeError: The caller passed a batch size.

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
    if not isinstance(starting_batch_size, int) or starting_batch_size < 1:
        raise ConfigurationError(
            f"starting_batch_size={starting_batch_size!r} must be a whole number from 1 (samples)."
        )
    size = starting_batch_size

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal size
        _refuse_batch_size(function, args)
        values: list[Any] = []

        def run() -> None:
            values.append(function(size, *args, **kwargs))

        while True:
            failure = attempt(run)
            if not _some_rank_is_full(failure):
                return values[0]
            values.clear()  # this rank fitted, another did not: its result goes too
            release_memory()
            tried, size = size, reduce_batch_size_fn() if reduce_batch_size_fn is not None else size // 2
            if size < 1:
                size = starting_batch_size
                raise BatchSizeError(
                    f"no batch size fits: memory ran out with {tried} too, the last one to try"
                )

    return call


def _some_rank_is_full(failure: Failure | None) -> bool:
    """Agree on what happened; an error that is not about memory ends all ranks."""
    broken = failure is not None and not failure.out_of_memory
    said = "" if failure is None else f"{'!' if broken else ''}{failure.summary}"
    happened = current_communicator().agree(failure is not None, said)
    errors = {rank: text[1:] for rank, text in happened.reasons.items() if text.startswith("!")}
    if errors:
        if failure is not None and failure.error is not None:
            raise failure.error
        rank, text = min(errors.items())
        raise BatchSizeError(f"the function failed on rank {rank}, so every rank stops: {text}")
    return bool(happened)


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    name = getattr(function, "__name__", repr(function))
    if not positional:
        raise TypeError(f"{name}() must take the batch size as its first argument")
    if len(args) + 1 > len(positional):
        given = ", ".join(repr(argument) for argument in args[1:])
        raise TypeError(
            f"{name}() got {len(args)} arguments in addition to the batch size, which the decorator adds itself."
            f" Call it without: {name}({given})"
        )
