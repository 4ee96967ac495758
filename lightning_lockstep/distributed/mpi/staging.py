"""From the tensors of a caller to memory that MPI can use, and back.

Contiguous tensors on the CPU are used as they are. Others are copied: strided ones into a contiguous one,
CUDA ones into pinned host memory on a stream of their own, so that the caller's stream never waits for MPI.
Where the MPI library takes CUDA memory, contiguous CUDA tensors are used as they are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_lockstep.distributed.mpi.progress import Body

__all__ = ["staged"]

_HALF = (torch.float16, torch.bfloat16)
_streams: dict[torch.device, Any] = {}


def staged(
    tensors: Sequence[Tensor],
    written: Sequence[bool],
    make: Callable[[list[Tensor]], Body],
    *,
    cuda_aware: bool,
) -> tuple[Body, Callable[[], None] | None]:
    """Return the operation with copies before and after it, and what a waiter must do at the end."""
    cuda = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if cuda is not None:
        return _on_cuda(cuda, tensors, written, make, cuda_aware)
    if all(tensor.is_contiguous() for tensor in tensors):
        return make([tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]), None
    return _strided(tensors, written, make), None


def _strided(
    tensors: Sequence[Tensor], written: Sequence[bool], make: Callable[[list[Tensor]], Body]
) -> Body:
    hosts = [tensor.detach().contiguous() for tensor in tensors]
    yield from make(hosts)
    for tensor, host, write in zip(tensors, hosts, written, strict=True):
        if write and host.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(host)


class _Reached:
    """A CUDA event that is waited for as MPI requests are."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def Test(self) -> bool:  # noqa: N802 - the name MPI requests have
        return bool(self._event.query())


def _on_cuda(
    device: torch.device,
    tensors: Sequence[Tensor],
    written: Sequence[bool],
    make: Callable[[list[Tensor]], Body],
    cuda_aware: bool,
) -> tuple[Body, Callable[[], None]]:
    written_before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    written_before.record(torch.cuda.current_stream(device))
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def body() -> Body:
        direct = cuda_aware and all(t.is_contiguous() and t.dtype not in _HALF for t in tensors)
        if direct:
            yield [_Reached(written_before)]
            yield from make([tensor.detach() for tensor in tensors])
            done.record(stream)
            return
        with torch.cuda.stream(stream):
            stream.wait_event(written_before)
            hosts = [_to_host(tensor, stream) for tensor in tensors]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        yield [_Reached(copied)]
        yield from make(hosts)
        with torch.cuda.stream(stream):
            for tensor, host, write in zip(tensors, hosts, written, strict=True):
                if write:
                    tensor.detach().copy_(host, non_blocking=True)
            done.record(stream)
        yield [_Reached(done)]  # the pinned memory must outlive the copy

    return body(), lambda: torch.cuda.current_stream(device).wait_event(done)


def _to_host(tensor: Tensor, stream: Any) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    tensor.record_stream(stream)
    return host
