"""Memory: how a trial is kept within a limit, which errors mean that it ran out, a function called until it fits."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import psutil
import torch

from lightning_lockstep._settings import Faults
from lightning_lockstep._system import memory_limit
from lightning_lockstep._text import first_line, size_in_words
from lightning_lockstep.distributed import current_communicator
from lightning_lockstep.errors import BatchSizeError, ConfigurationError

# -- How the C library keeps freed memory, which decides what a batch needs on CPU --
# glibc returns a freed block to the system if it was large enough to be mapped by itself. That threshold rises to the
# size of the largest block freed so far (up to 32 MiB), and glibc keeps smaller blocks. What a step needs then depends
# on all that ran before it: up to 1.5 times as much was seen, and a size that fitted may not fit in another trial.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


@cache
def _c_function(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


def return_freed_memory(least: int = 2**20) -> None:
    """From now on, return every block of this many bytes or more to the system when it is freed."""
    # The system has to supply the pages again in the next step, which takes time. This does nothing if the C library
    # is not glibc, or if the environment has set its thresholds.
    mallopt = _c_function("mallopt")
    own = "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if mallopt is None or _c_function("gnu_get_libc_version") is None or own:
        return
    mallopt(_MMAP_THRESHOLD, least)
    mallopt(_TRIM_THRESHOLD, 2 * least)


# -- How much memory a trial may take: an allocation beyond that raises, on CPU too --
# On CPU nothing stops a process that takes too much memory until the kernel kills it. During a trial the process
# therefore limits itself, and an allocation beyond the limit fails with an ordinary error.

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """Return the number of bytes in a number or in text such as ``"4GiB"`` or ``"500 MB"``."""
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0:
        return int(text)
    found = re.fullmatch(r"\s*([0-9.]+)\s*([kmgt]i?)?b?\s*", str(text).lower())
    with suppress(ValueError):
        size = float(found.group(1)) * _UNITS[found.group(2) or ""] if found else 0.0
        if size > 0:
            return int(size)
    raise ConfigurationError(f"memory_limit={text!r}: expected a number of bytes, or text such as '4GiB'.")


@dataclass(frozen=True)
class MemoryLimit:
    """How much memory this process may take on its device in a trial."""

    device: torch.device
    size: int | None  # [bytes]; None: the device raises by itself when it is full
    source: str  # where the limit comes from, for messages
    # Memory that the run will take and a trial does not [bytes]; it counts as if it were in use.
    owed: int = 0

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """Let allocations beyond the limit fail while the body runs."""
        if self.size is None:
            yield
        elif self.device.type == "cuda":
            before = torch.cuda.get_per_process_memory_fraction(self.device)
            share = self.size / torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(before, share), self.device)
            try:
                yield
            finally:
                torch.cuda.set_per_process_memory_fraction(before, self.device)
        else:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            # The limit is on top of what is reserved now: malloc can use reserved addresses without pages again.
            now = psutil.Process().memory_info()
            room = self.size - self.owed - now.rss
            if room <= 0:
                raise MemoryError(f"{size_in_words(now.rss)} are in use before the step")
            allowed = now.data + room
            lower = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min([allowed, *lower]), hard))
            try:
                yield
            except RuntimeError as error:
                # oneDNN gives no other reason if it has no memory for the machine code of an operation.
                if "could not create a primitive" in str(error):
                    raise MemoryError(str(error)) from error
                raise
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def attempt(self, step: Callable[[], None], *, in_thread: bool = False) -> Failure | None:
        """Call a step within the limit, perhaps in a thread of its own; return how it failed, or ``None``."""

        def limited() -> None:
            with self.enforced():
                step()

        if not in_thread:
            return attempt(limited)

        def with_threads() -> Failure | None:
            # Without the limit, because OpenMP ends the process if it cannot start the threads that work for this one.
            torch.zeros(2**15 * torch.get_num_threads()).add_(1)
            return attempt(limited)

        with ThreadPoolExecutor(1, "lockstep-trial") as thread:
            return thread.submit(with_threads).result()


def limit_of_trials(
    device: torch.device, *, given: int | None = None, local_ranks: int = 1, owed: int = 0
) -> MemoryLimit:
    """Return the limit of a process: ``given`` [bytes], or on CPU its share of the memory of its host."""
    if device.type == "cpu":
        if given is not None:
            return MemoryLimit(device, given, "memory_limit", owed)
        size, source = memory_limit()
        source += "" if local_ranks == 1 else f" / {local_ranks} ranks"
        return MemoryLimit(device, size // local_ranks, source, owed)
    if device.type == "cuda" and given is not None:
        return MemoryLimit(device, given, "memory_limit")
    return MemoryLimit(device, None, f"free memory of {device}")


# -- Which errors mean that memory ran out, and how to get it back --
# Only errors that say so count. A wrong shape, a device-side assertion or a bug must be reported at once, and not be
# taken for a batch that is too large.

# What allocators and libraries write, in lower case.
_TEXTS = (
    "out of memory",  # CUDA, HIP, XPU, MPS, NPU, nccl; XLA on CPU
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "alloc_failed",  # CUBLAS_STATUS_..., CUDNN_STATUS_..., CUSOLVER, CUSPARSE, CUFFT, HIPBLAS
    "cudnn_status_internal_error_host_allocation_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "module:pt_devmem allocation failed",  # HPU
    "resource_exhausted",  # XLA
    "std::bad_alloc",
    "cudnn error: cudnn_status_not_supported",  # also if the workspace of no algorithm fits
)


def is_out_of_memory(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower() if isinstance(seen, RuntimeError) else ""
        if isinstance(seen, (torch.OutOfMemoryError, MemoryError)) or any(known in text for known in _TEXTS):
            return True
        if isinstance(seen, OSError) and seen.errno == errno.ENOMEM:
            return True
        seen = seen.__cause__
    return False


@dataclass(frozen=True)
class Failure:
    summary: str  # the error's type and its first line
    out_of_memory: bool
    # None if memory ran out, because the traceback would keep the tensors of its frames alive.
    error: Exception | None = None

    @classmethod
    def of(cls, error: Exception) -> Failure:
        name, line = type(error).__name__, first_line(error)
        summary = name if line == name else f"{name}: {line}"
        full = is_out_of_memory(error)
        return cls(summary, full, None if full else error)


def attempt(function: Callable[[], Any]) -> Failure | None:
    """Call ``function`` and return how it failed, or ``None``."""
    # When this returns, the ``except`` clause has ended and nothing refers to the frames of a call that ran out of
    # memory, so that their tensors can be freed.
    try:
        function()
    except Exception as error:
        return Failure.of(error)
    return None


def release_memory(*, collect: bool = True) -> None:
    """Give memory that nothing uses back to the device, or on CPU to the operating system."""
    # This must not be called in an ``except`` clause, whose error keeps tensors alive.
    if collect:
        gc.collect()  # after an error, reference cycles can keep tensors alive
    device = torch.accelerator.current_accelerator(check_available=True)
    # torch.accelerator.empty_cache would raise if torch does not know the allocator of the device.
    backend: Any = None if device is None else getattr(torch, device.type, None)
    if hasattr(backend, "empty_cache") and getattr(backend, "is_initialized", lambda: True)():
        backend.empty_cache()
    if (trim := _c_function("malloc_trim")) is not None:  # returns memory that malloc keeps to the system
        trim(0)


def ranks_that_are_full(failure: Failure | None, what: str) -> Mapping[int, str]:
    """Return the ranks out of memory, with reasons; raise on all for any other error. Ranks: all; 4 bytes."""
    said = "" if failure is None else failure.summary
    if failure is not None and not failure.out_of_memory:
        said = "!" + said
    reasons = current_communicator().agree(failure is not None, said)
    errors = {rank: text[1:] for rank, text in reasons.items() if text.startswith("!")}
    if not errors:
        return reasons
    if failure is not None and failure.error is not None:
        raise failure.error
    rank, text = min(errors.items())
    raise BatchSizeError(f"{what} failed on rank {rank}, so every rank stops: {text}")


# -- For code without a Trainer: a function called with ever smaller batches until one fits --

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
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    faults = Faults()
    faults.whole("starting_batch_size", starting_batch_size, what="a whole number of samples")
    faults.raise_all()
    size = starting_batch_size

    @wraps(function)
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
                raise BatchSizeError(f"no batch size fits: memory ran out even with {tried}, the last size to try")
        return values[0]

    return call
