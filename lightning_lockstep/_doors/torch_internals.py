"""What torch keeps private and this package uses: each name once, with its reason. No other module touches them.

Where a name is missing when it is needed, a `LockstepError` says so; without one of `TORCH_IF_THERE` less is done.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_lockstep._doors import Door

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

_WHY_METHODS = "torch calls this method of a process group, and the backend mpi4py has its own"

TORCH = Door(
    "torch",
    {
        # What classes of ours override, since torch calls it.
        "torch.distributed.ProcessGroup._allgather_base": _WHY_METHODS,
        "torch.distributed.Work._source_rank": "torch asks a receive from any rank in this way who has sent",
        "torch.distributed.ProcessGroupGloo._set_default_timeout": "torch sets the timeout of a backend by it, and"
        " the backend mpi4py has its own",
    },
)

# What some builds or releases lack; what happens without it stands in the reason.
TORCH_IF_THERE = Door("torch")
SYNC_STATES = "_sync_dist"
TORCHMETRICS = Door(
    "torchmetrics",
    {
        f"torchmetrics.Metric.{SYNC_STATES}": "gathers the states of a metric, once it has kept this rank's own",
    },
)


def _noted(path: str, why: str) -> str:
    """Note a name that is used as a text, and return the text."""
    TORCH.names[path] = why
    return path.rpartition(".")[2]


# -- distributed: operators and kernels of the dispatcher --

_WHY_OPERATOR = "the operator by which torch calls a process group, whose kernel is replaced or seen"
ALL_GATHER_BASE = _noted("torch.ops.c10d._allgather_base_", _WHY_OPERATOR)
REDUCE_SCATTER_BASE = _noted("torch.ops.c10d._reduce_scatter_base_", _WHY_OPERATOR)
REDUCE_SCATTER_METHOD = _noted(
    "torch.distributed.ProcessGroup._reduce_scatter_base",
    f"{_WHY_METHODS}; in torch 2.9 it also tells how it reduces",
)

FUNCTIONAL_NAMESPACE = "_c10d_functional"
FUNCTIONAL_REDUCTIONS = (
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)


@TORCH.touches(
    *(f"torch.ops.{FUNCTIONAL_NAMESPACE}.{name}" for name in FUNCTIONAL_REDUCTIONS),
    why="how a functional collective reduces can be read here alone in torch 2.9",
)
def functional_operator(name: str) -> Any:
    """Return the operator of a functional collective."""
    return getattr(getattr(torch.ops, FUNCTIONAL_NAMESPACE), name).default


@TORCH.touches(
    "torch._ops.OpOverload._schema", why="names and number of what an operator is given and returns"
)
def schema_of(overload: Any) -> Any:
    """Return the schema of an operator."""
    return overload._schema


@TORCH.touches(
    "torch._C._dispatch_keyset_full_after",
    "torch._C.DispatchKey",
    why="a kernel hands an operation on to those behind it",
)
def keys_after(key: str) -> Any:
    """Return the set of the dispatcher's keys behind one."""
    return torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))


@TORCH.touches("torch.library.Library._destroy", why="takes kernels away when we say so")
def destroy_library(library: Any) -> None:
    """Take away the kernels that a library has registered."""
    library._destroy()


@TORCH.touches("torch.library._scoped_library", why="replaces kernels until the end of a with statement")
def scoped_library(namespace: str) -> AbstractContextManager[Any]:
    """Return a library of kernels for operators of a namespace, which are taken away at its end."""
    library: AbstractContextManager[Any] = torch.library._scoped_library(namespace, "IMPL")
    return library


@TORCH.touches(
    "torch._C._dispatch_has_kernel_for_dispatch_key", why="only a kernel that is there can be replaced"
)
def has_kernel(name: str, key: str) -> bool:
    """Return whether an operator, such as ``c10d::send``, has a kernel for a key of the dispatcher."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@TORCH.touches(
    "torch._C._jit_get_custom_class_schemas", why="torch 2.9 hands out reductions that Python cannot read"
)
def custom_class_schemas() -> list[Any]:
    """Return the schemas of the methods of all classes that torch has registered."""
    return list(torch._C._jit_get_custom_class_schemas())  # type: ignore[attr-defined]


@TORCH.touches(
    "torch._C._distributed_c10d._create_work_from_future",
    why="a collective that is answered here returns a handle as others do, which C++ takes too",
)
def finished_work(future: Any) -> Any:
    """Return the work handle of a future."""
    return torch._C._distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


# -- distributed: process groups --

_touches_world = TORCH.touches(
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._World.pg_map",
    "torch.distributed.distributed_c10d._World.pg_group_ranks",
    why="the process groups of this rank, with their stores and ranks; torch has no public list of them",
)


@_touches_world
def stores_of_groups() -> dict[Any, Any]:
    """Return each process group that this rank belongs to with its store."""
    # A copy: the main thread may be making a group.
    return {
        group: store for group, (_, store) in list(torch.distributed.distributed_c10d._world.pg_map.items())
    }


@_touches_world
def ranks_of_groups() -> dict[Any, dict[int, int]]:
    """Return the ranks of each process group, with their ranks in it; torch has an entry for those of others too."""
    return dict(torch.distributed.distributed_c10d._world.pg_group_ranks)


@TORCH.touches(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    why="gradients that accumulate without a reduction are kept there alone, whole ones on each rank",
)
def unreduced_holders(part: Any) -> list[Any]:
    """Return what holds gradients of a part of ``fully_shard``, in ``unsharded_accumulated_grad``."""
    return [holder for one in _groups(part) for holder in one.fsdp_params]


def _groups(part: Any) -> list[Any]:
    state = part._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    return list(getattr(state, "_fsdp_param_groups", [] if group is None else [group]))


@TORCH.touches(
    "torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState.FORWARD",
    why="fully_shard frees what is gathered at the end of a forward method that has called forward, whatever"
    " reshard_after_forward says",
)
def stay_in_forward(part: Any) -> None:
    """Let a part of ``fully_shard`` be in its forward pass until the forward method that is running ends."""
    for group in _groups(part):
        group._training_state = type(group._training_state).FORWARD


@TORCH.touches(
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    why="whole gradients of a step that was broken off are kept there, and asking by the public name fails before the"
    " first gather",
)
def gathered_parameter(holder: Any) -> Tensor | None:
    """Return the whole parameter of such a holder; ``None`` before it is gathered for the first time."""
    return getattr(holder, "_unsharded_param", None)


# As a pickle names it.
GET_LAYOUT = (
    "torch.serialization",
    _noted(
        "torch.serialization._get_layout",
        "by it torch's distributed checkpoint writes the layout of a tensor",
    ),
)


@TORCH.touches(
    "torch.distributed.distributed_c10d._get_default_store",
    why="the ranks meet at the store of the default group",
)
def default_store() -> Any:
    """Return the store of the default process group."""
    return torch.distributed.distributed_c10d._get_default_store()


_touches_backends = TORCH.touches(
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._device_types",
    "torch._C._distributed_c10d.Backend.Options._timeout",
    why="only the backends of a group know its timeout, and can abort what nccl does",
)


@_touches_backends
def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of a process group for a device."""
    return group._get_backend(device)


@_touches_backends
def timeout_of(group: Any) -> timedelta | None:
    """Return how long the operations of a process group wait, where a backend of it says so."""
    for device in group._device_types:
        timeout: timedelta | None = getattr(group._get_backend(device).options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


@TORCH.touches(
    "torch.distributed.Reducer._check_reducer_finalized",
    why="says whether every bucket was reduced, after a backward by hand",
)
def check_reduced(ddp: DistributedDataParallel) -> None:
    """Raise where DDP's reducer still waits for gradients."""
    ddp.reducer._check_reducer_finalized()


_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")


@TORCH_IF_THERE.touches(
    *(f"torch._C._distributed_c10d.{name}" for name in _RECORDERS),
    why="what the last collectives were, of gloo and of nccl; without both, reports have no calls of C++",
)
def flight_recorders() -> list[tuple[str, Callable[..., bytes]]]:
    """Return the functions of this build that give torch's records of collectives, by their names."""
    found = ((name, getattr(torch._C._distributed_c10d, name, None)) for name in _RECORDERS)
    return [(name, dump) for name, dump in found if dump is not None]


# -- containers of any structure --

_touches_trees = TORCH.touches(
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_flatten_with_path",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils._pytree.keystr",
    why="containers as torch takes them apart, those that users have registered included",
)


@_touches_trees
def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a container and its structure."""
    return torch.utils._pytree.tree_flatten(tree)


@_touches_trees
def tree_flatten_with_names(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves of a container, each with the text of its place, and its structure."""
    leaves, structure = torch.utils._pytree.tree_flatten_with_path(tree)
    return [(torch.utils._pytree.keystr(path), leaf) for path, leaf in leaves], structure


@_touches_trees
def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a container of the same structure with the results of a function."""
    return torch.utils._pytree.tree_map(function, tree)


@_touches_trees
def tree_unflatten(leaves: list[Any], structure: Any) -> Any:
    """Return a container of a structure."""
    return torch.utils._pytree.tree_unflatten(leaves, structure)


# -- tensors --

TORCH.names["torch.Tensor._version"] = "tells whether something has written to a tensor, without reading it"


@functools.cache
def version_getter() -> Callable[[Tensor], int]:
    """Return a function that returns how often a tensor was written to, as fast as the attribute itself."""
    TORCH.find("torch.Tensor._version")
    return operator.attrgetter("_version")


TORCH.names["torch._amp_foreach_non_finite_check_and_unscale_"] = (
    "finds nan and infinity in many tensors in one pass, and leaves them as they are"
)


@functools.cache
def non_finite_check() -> Callable[[Sequence[Tensor], Tensor, Tensor], None]:
    """Return torch's function that multiplies tensors by the last and sets the flag where one is not finite."""
    check: Callable[[Sequence[Tensor], Tensor, Tensor], None] = TORCH.find(
        "torch._amp_foreach_non_finite_check_and_unscale_"
    )
    return check


@TORCH.touches("torch._foreach_copy_", why="one fused call for many small tensors, at every step")
def copy_each(to: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors, each to another."""
    torch._foreach_copy_(to, values)


@TORCH.touches("torch.Tensor._values", why="values() refuses a sparse tensor that is not coalesced")
def stored_values(sparse: Tensor) -> Tensor:
    """Return the values that a sparse tensor in COO format stores."""
    return sparse._values()


@TORCH.touches(
    "torch._C._swap_tensor_impl",
    why="a parameter has other gradients and hooks for a while, and is the same object wherever a program keeps it;"
    " torch.utils.swap_tensors refuses one that DDP knows",
)
def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange what two tensors are: memory, gradients and the hooks that wait for them."""
    torch.clear_autocast_cache()  # it refers to what is to be exchanged
    torch._C._swap_tensor_impl(one, other)


_touches_hooks = TORCH.touches(
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    why="hooks of a program on a parameter act in a step that is made apart from the run too, and never again once"
    " fully_shard has put another tensor in its place",
)


@_touches_hooks
def hook_again(parameter: Tensor) -> None:
    """Have the hooks that a parameter keeps called for the gradients that it has now."""
    parameter._backward_hooks = parameter._backward_hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


@_touches_hooks
def is_hooked(parameter: Tensor) -> bool:
    """Return whether a program has registered hooks for the gradient of a parameter."""
    hooks: Any = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return any(hooks)


@TORCH.touches("torch.UntypedStorage._cdata", why="tells empty storages apart, which have no address")
def storage_identity(tensor: Tensor) -> int:
    """Return a number that tensors share if they share their storage."""
    return int(tensor.untyped_storage()._cdata)


# -- modules and loaders --

# Attributes of a module, by these names in its vars().
PARAMETERS = _noted(
    "torch.nn.Module._parameters",
    "what holds a module's parameters is no plain attribute that a step changes",
)
MODULES = _noted(
    "torch.nn.Module._modules", "what holds a module's parts is no plain attribute that a step changes"
)
BUFFERS = "_buffers"
_touches_buffers = TORCH.touches(
    f"torch.nn.Module.{BUFFERS}",
    why="buffers are put back at their places, also those that were None, which named_buffers() leaves out",
)


@_touches_buffers
def buffer_places(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the places of all buffers, as the part of the module and the name there."""
    return [(part, name) for part in module.modules() for name in part._buffers]


@_touches_buffers
def buffers_at(places: list[tuple[nn.Module, str]]) -> list[Tensor | None]:
    """Return the buffers at such places as they are now."""
    return [part._buffers.get(name) for part, name in places]


@_touches_buffers
def put_buffer(part: nn.Module, name: str, buffer: Tensor) -> None:
    """Put a buffer at its place, whatever the module does with attributes."""
    part._buffers[name] = buffer


LOAD_OWN_VALUES = _noted(
    "torch.nn.Module._load_from_state_dict",
    "by it load_state_dict() loads one module without its parts, whose parameters are gathered meanwhile",
)


_touches_versions = TORCH_IF_THERE.touches(
    "torch.nn.Module.state_dict._metadata",
    why="versions of modules in what state_dict() returns; without them load_state_dict takes all for old",
)


@_touches_versions
def versions_of_modules(state: Any) -> Any:
    """Return the versions of the modules in a state dict; ``None`` without."""
    return getattr(state, "_metadata", None)


@_touches_versions
def set_versions_of_modules(state: Any, versions: Any) -> None:
    """Put versions of modules into a state dict."""
    state._metadata = versions


@TORCH.touches(
    "torch.utils.data.DataLoader._iterator",
    why="a copy of a loader must not share the workers that the original keeps",
)
def forget_iterator(loader: DataLoader[Any]) -> None:
    """Have a loader make its iterator anew."""
    vars(loader)["_iterator"] = None


@contextmanager
@TORCH.touches(
    "torch.utils.data._utils.worker._worker_info",
    why="a data set that divides itself among workers has to be read as a whole by each",
)
def as_worker(info: Any) -> Iterator[None]:
    """Let ``torch.utils.data.get_worker_info`` return ``info``."""
    holder: Any = torch.utils.data._utils.worker
    before, holder._worker_info = holder._worker_info, info
    try:
        yield
    finally:
        holder._worker_info = before


# -- torch.compile, extensions --

# What wrappers call the module in them.
WRAPPED_MODULES = (
    _noted(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "what torch.compile calls the module that it wraps, which names of modules leave out",
    ),
    _noted(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper._checkpoint_wrapped_module",
        "what a wrapper for checkpointing calls the module in it, which names of modules leave out",
    ),
)


@TORCH.touches(
    "torch.nn.Module._compiled_call_impl", why="whether torch.compile has compiled a module in place"
)
def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has wrapped a module, or compiled it in place."""
    return hasattr(module, WRAPPED_MODULES[0]) or getattr(module, "_compiled_call_impl", None) is not None


@TORCH.touches("torch._dynamo", why="it takes seconds to import, and without it nothing is compiled")
def may_be_compiled() -> bool:
    """Return whether anything in this process may have been compiled by ``torch.compile``."""
    return "torch._dynamo" in sys.modules


@TORCH.touches(
    "torch._dynamo.utils.get_compilation_metrics",
    *(
        f"torch._dynamo.utils.CompilationMetrics.{name}"
        for name in (
            *("compile_id", "co_name", "co_filename", "co_firstlineno"),
            *("recompile_reason", "start_time_us", "duration_us"),
        )
    ),
    why="what torch.compile has compiled, when, for how long and why again; nothing public tells",
)
def compilation_records() -> list[Any]:
    """Return torch's records of its last compilations; none before ``torch.compile`` is used."""
    utils = sys.modules.get("torch._dynamo.utils")
    return [] if utils is None else list(utils.get_compilation_metrics())


@TORCH.touches(
    "torch.utils.cpp_extension._get_build_directory",
    why="the only place that knows how the folder depends on the versions of Python and CUDA",
)
def extension_folder(name: str) -> str:
    """Return the folder in which torch builds an extension, made if it is not there."""
    from torch.utils import cpp_extension

    return cpp_extension._get_build_directory(name, verbose=False)


@TORCH_IF_THERE.touches(
    "torch.ops.mkldnn._is_mkldnn_fp16_supported",
    why="whether this CPU computes in float16, as DeepSpeed asks; without it, it is taken not to",
)
def cpu_has_float16() -> bool:
    """Return whether torch's oneDNN computes in float16 on this CPU."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    except (AttributeError, RuntimeError):
        return False
