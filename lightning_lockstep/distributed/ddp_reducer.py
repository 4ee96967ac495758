"""DDP's reducer: its communication hooks by name, and a step finished by hand on a rank whose backward ended early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.errors import CollectiveStallError

# -- Gradient compression hooks of DistributedDataParallel, by name --

HOOKS = ("fp16_compress", "bf16_compress", "power_sgd")

# A collective that did not end has this long after its timeout to raise its own error, which says more [s].
_LATER = 5.0

# These hooks call no other collective in a callback.
_ONE_COLLECTIVE = (
    default_hooks.allreduce_hook,
    default_hooks.bf16_compress_hook,
    default_hooks.fp16_compress_hook,
    post_localSGD_hook.post_localSGD_hook,
)


def compression_hook(
    hook: str | Callable[..., Any] | None,
    state: object | None,
    wrapper: Callable[..., Any] | None,  # makes a hook of the hook
    *,
    timeout: float,  # of the process group [s]
) -> tuple[Callable[..., Any] | None, object | None]:
    """Return (hook, state) for a gradient compression hook given by name or as a function."""
    # Source: https://pytorch.org/docs/stable/ddp_comm_hooks.html
    if hook == "power_sgd":
        hook = powerSGD_hook.powerSGD_hook
        state = state or powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1)
    elif isinstance(hook, str):
        hook = getattr(default_hooks, f"{hook}_hook")
    if not callable(hook):
        return None, state
    ends_by_itself = hook in _ONE_COLLECTIVE and wrapper is None
    made = wrapper(hook) if wrapper is not None else hook

    def in_order(state: Any, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotation
        # NCCL runs callbacks at once, gloo and mpi4py in threads of their own. There a callback's collective and the
        # next bucket's may begin in different orders on the ranks: with equal shapes weights differ without an error.
        future = made(state, bucket)
        # Torch raises an error for what is not a future.
        waits = not ends_by_itself and isinstance(future, torch._C.Future)
        if waits and not (bucket.buffer().is_cuda and "nccl" in dist.get_backend_config()):
            is_complete = threading.Event()
            future.add_done_callback(lambda _: is_complete.set())
            if not is_complete.wait(timeout + _LATER):
                raise CollectiveStallError(
                    f"The future that {getattr(hook, '__qualname__', hook)} returned for bucket {bucket.index()} is not"
                    f" complete after {timeout:g} s, the timeout of the process group. Outside NCCL a bucket is"
                    " completed before the next one is handed to the hook, so a hook must not complete futures in the"
                    " call for a later bucket (`bucket.is_last()`): give each bucket one that completes by itself."
                )
            future.wait()  # raises its error
        return future

    return in_order, state


# -- Finish a DDP step by hand on a rank whose backward ended early --
# DDP reduces gradients in buckets while the backward runs. A rank that runs out of memory half way has sent some
# buckets, and the other ranks wait for the rest. The reducer does not ask which backward a gradient comes from: once
# the missing gradients have been computed in another way, a backward that touches just those parameters makes it send
# the missing buckets in their usual order, and finish as if nothing had happened. The other ranks cannot tell the
# difference, and no step pays for it beforehand.


def ddp_of(model: object) -> DistributedDataParallel | None:
    return model if isinstance(model, DistributedDataParallel) else None


def untouched_buckets(model: object) -> int:
    """Return how much memory DDP has reserved that the first reduction is the first to use [bytes]."""
    ddp = ddp_of(model)
    if ddp is None:
        return 0
    return sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad)


def why_not_resumable(model: object) -> str:
    """Return why a step of this wrapper cannot be finished by hand, the same on all ranks; empty if it can."""
    ddp = ddp_of(model)
    if ddp is None:
        return ""
    if ddp.static_graph:
        return "static_graph=True counts gradient hooks, which a step in micro-batches changes"
    if ddp.mixed_precision is not None:
        return "DDP's own mixed precision keeps copies of the parameters"
    if any(isinstance(module, nn.SyncBatchNorm) for module in ddp.modules()):
        return "SyncBatchNorm communicates in every forward, so one rank cannot run more of them than the others"
    return ""


class GradientMarks:
    """Tells which parameters have got their gradient in a backward that ended early."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        # This is called right before the backward, and takes about 0.1 us for each parameter.
        # A gradient is either new, or accumulated in place, which raises its version.
        self._before = [(g, -1 if g is None else g._version) for g in [p.grad for p in parameters]]

    def missing(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Return those of the same ``parameters`` whose gradient has not arrived."""
        return [
            parameter
            for parameter, (grad, version) in zip(parameters, self._before, strict=True)
            if parameter.grad is grad and (grad is None or grad._version == version)
        ]


def deliver_gradients(
    ddp: DistributedDataParallel | None,  # whose forward of this step was called
    gradients: dict[nn.Parameter, Tensor | None],  # that DDP waits for; emptied, so that none is copied
    *,
    backward_began: bool,
) -> None:
    """Let gradients arrive at their parameters as at the end of a backward."""
    # Hooks of the parameters see each gradient once, it is added to ``.grad``, DDP reduces it and ends its step.
    reduces = ddp is not None and ddp.require_backward_grad_sync
    parameters = list(gradients)
    if ddp is None or not reduces or ddp.find_unused_parameters:
        # A parameter without a gradient is left out if nothing waits for it, or if DDP itself looks for unused ones.
        with_gradient = [p for p in parameters if gradients[p] is not None]
        parameters = with_gradient or (parameters[:1] if reduces else [])
    # A gradient that each of these is given reaches its parameter as in any backward.
    arrivals = {p: p.expand_as(p) if gradients[p] is not None else sum_of_nothing([p], ddp) for p in parameters}
    if parameters and ddp is not None and reduces and not backward_began:
        ddp.require_forward_param_sync = True
        ddp.reducer.prepare_for_backward([*arrivals.values()] if ddp.find_unused_parameters else [])
    for parameter in reversed(parameters):  # the order of a backward in most models
        torch.autograd.backward(arrivals.pop(parameter), gradients.pop(parameter))
    gradients.clear()
    if parameters and ddp is not None and reduces:
        ddp.reducer._check_reducer_finalized()  # RuntimeError: a bucket was not reduced, so DDP cannot go on


def sum_of_nothing(parameters: Sequence[Tensor], model: nn.Module | None) -> Tensor:
    """Return a zero whose backward gives parameters of ``model`` gradients of zeros."""
    # The sum of no elements has such gradients whatever the parameters hold; a sparse gradient stays sparse.
    sparse = {id(weight) for weight in sparse_weights(model)} if model is not None else ()
    nothing = torch.empty(0, dtype=torch.int64, device=parameters[0].device)
    terms = [
        nn.functional.embedding(nothing.to(p.device), p, sparse=True)
        if id(p) in sparse
        else (p if p.dim() else p.reshape(1))[:0]
        for p in parameters
    ]
    return torch.stack([term.sum().real.to(nothing.device, torch.float32) for term in terms]).sum()


def sparse_weights(model: nn.Module) -> list[Tensor]:
    """Return the trained weights for which DDP expects sparse gradients."""
    kinds = nn.Embedding, nn.EmbeddingBag
    layers = (one for one in model.modules() if isinstance(one, kinds) and one.sparse)
    return [layer.weight for layer in layers if layer.weight.requires_grad]
