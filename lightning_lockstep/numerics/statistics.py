"""Statistics of tensors and of the values that a module takes and gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

# -- Names of modules, and of the values in their inputs and outputs --
# Containers are walked here and not by ``tree_flatten_with_path`` or ``apply_to_collection``: the former
# takes dataclasses and mappings of other classes (as Transformers' outputs are) for leaves unless they are
# registered, the latter hands out no names.

# What torch.compile and a wrapper for checkpointing call the module in them.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
# Containers nested deeper are not looked into, which also ends cycles.
_DEPTH = 5


class NamePatterns:
    """Shell-style patterns for names such as ``decoder.block.0.output['mask']``."""

    # A pattern matches a name as printed, or with its indices written with dots (``decoder.block.0.output.mask``).

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def match(self, name: str) -> bool:
        """Return whether any pattern matches the name."""
        if name not in self._known:
            names = name, dotted(name)
            self._known[name] = any(fnmatchcase(each, p) for p in self.patterns for each in names)
        return self._known[name]


def dotted(name: str) -> str:
    """Return a name with its indices written with dots."""
    return name.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return the name of every module, without the wrappers that ``torch.compile`` and checkpointing put in."""
    return {
        module: ".".join(part for part in name.split(".") if part not in _WRAPPED)
        for name, module in root.named_modules()
    }


def call_values(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (label, value) for all that a module was called with: ``input[i]``, ``input['name']``."""
    for index, value in enumerate(args if isinstance(args, tuple) else (args,)):
        yield from output_values(value, f"input[{index}]")
    for name, value in kwargs.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            yield from output_values(value, f"input[{name!r}]")


def output_values(value: Any, label: str = "output", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """Yield (label, value) for all that a module returned: ``output``, ``output[i][j]``, ``output['name']``."""
    children = _children(value) if depth else None
    if children is None:
        yield label, value
        return
    for key, child in children:
        yield from output_values(child, f"{label}[{key!r}]", depth - 1)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (Tensor, str, bytes)) or value is None:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a batch of any structure, in its order."""
    return [part for _, part in output_values(value) if isinstance(part, Tensor)]


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the length of the first tensor found; 1 without one."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.ndim), 1)


# -- Statistics of a tensor, measured against the number format it is computed in --

#: The formats whose range or precision a training step can exceed in the ordinary course.
LOW_PRECISION = (torch.float16, torch.bfloat16)

# Places named in a report are the first few along the batch dimension.
_PLACES_NAMED = 8


@dataclass(frozen=True)
class TensorStatistics:
    dtype: str
    shape: tuple[int, ...]
    abs_min: float  # smallest magnitude; nan if any value is nan
    abs_max: float  # largest one, likewise
    nan: int = 0  # how many
    inf: int = 0  # how many, of either sign
    used_as: str = ""  # dtype of the computation: autocast's if that is narrower
    # Largest finite magnitude as a share of the largest number of used_as; None for integers.
    range_used: float | None = None
    zero: float = 0.0  # share of exact zeros
    subnormal: float = 0.0  # share below the smallest normal number of used_as that are not zero in it
    flushed: float = 0.0  # share of values that are not zero here, but zero in used_as
    places: tuple[int, ...] = ()  # first indices along dimension 0, often the batch, that hold nan or inf

    def remarks(self) -> str:
        """Return briefly what stands out beyond the magnitudes; empty if nothing does."""
        parts = []
        if self.nan:
            parts.append(f"{self.nan} nan")
        if self.inf:
            parts.append(f"{self.inf} inf")
        if self.places and self.shape and self.shape[0] > 1:
            parts.append(
                f"at [{', '.join(map(str, self.places))}{', ...' if len(self.places) == _PLACES_NAMED else ''}]"
            )
        shares = {
            "of range": self.range_used or 0.0,
            "zero": self.zero,
            "flushed to zero": self.flushed,
            "subnormal": self.subnormal,
        }
        parts += [f"{share:.1%} {what}" for what, share in shares.items() if share >= 0.001]
        kind = self.dtype if self.used_as in ("", self.dtype) else f"{self.dtype} used as {self.used_as}"
        return f"{kind}: {', '.join(parts)}" if parts else ""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them; nan and inf become text."""
        return {key: json_number(value) for key, value in asdict(self).items()}


def plain_values(value: object) -> Tensor | None:  # None: no tensor, an empty one, or on the meta device
    """Return the values of a tensor as a dense, detached one that ordinary operations accept."""
    # A sparse tensor gives its stored values, a DTensor the shard of this rank, a bool one becomes integers,
    # an 8-bit float becomes float32. Nothing is communicated.
    if not isinstance(value, Tensor):
        return None
    with torch.no_grad():
        tensor = value.detach()
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
        if tensor.is_meta:
            return None
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()  # values() refuses one that is not coalesced
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        if tensor.numel() == 0:
            return None
        if tensor.dtype is torch.bool:
            return tensor.to(torch.uint8)
        if tensor.is_floating_point() and tensor.element_size() == 1:
            return tensor.float()
        return tensor


def has_bad_values(value: object, *, allow_inf: bool = False) -> bool:
    """Return whether a value is a tensor with a nan or an infinity; on a GPU this waits once."""
    tensor = plain_values(value)
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    with torch.no_grad():
        ends = torch.stack(torch.aminmax(tensor)).tolist()  # one wait for both
    return any(math.isnan(end) or (math.isinf(end) and not allow_inf) for end in ends)


def any_bad(tensors: Sequence[Tensor]) -> bool:
    """Return whether any tensor holds a nan or an infinity; they keep their values. On a GPU this waits once."""
    # On the CPU neither ``isfinite().all()`` nor an infinity norm is vectorised, and for small tensors a call
    # each costs more than reading them. The operation with which ``torch.amp.GradScaler`` unscales gradients
    # takes a whole list of any dtypes in one call; with a scale of one it leaves them as they are. On a GPU it
    # refuses bfloat16 and writes what it has read, and a norm of the whole list is as few calls.
    if tensors and tensors[0].is_cpu:
        # Else a sparse tensor, a DTensor, one of another device or another that the operation refuses is among them.
        with suppress(RuntimeError, NotImplementedError, TypeError):
            found = torch.zeros(1)
            # One pass, which leaves the tensors as they are.
            torch._amp_foreach_non_finite_check_and_unscale_([*tensors], found, torch.ones(()))
            return bool(found)
    usual = [tensor for tensor in tensors if _is_usual(tensor)]
    with torch.no_grad():
        if usual and usual[0].device.type == "xla":  # whose maximum passes over a nan
            bad = ~torch.stack([tensor.isfinite().all() for tensor in usual]).all()
        else:
            bad = ~torch.nn.utils.get_total_norm(usual, math.inf).isfinite()
    return bool(bad) or any(has_bad_values(tensor) for tensor in tensors if not _is_usual(tensor))


def _is_usual(tensor: Tensor) -> bool:
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_dense and tensor.is_contiguous() and tensor.is_floating_point() and tensor.element_size() > 1


def tensor_statistics(value: object, *, used_as: torch.dtype | None = None) -> TensorStatistics | None:
    """Measure a tensor in several passes, ``None`` without values; on a GPU it waits for them."""
    tensor = plain_values(value)
    if tensor is None:
        return None
    assert isinstance(value, Tensor)
    with torch.no_grad():
        magnitude = tensor.abs()
        low, high = torch.aminmax(magnitude)
        count = tensor.numel()
        figures: dict[str, Any] = {
            "dtype": _name(value.dtype),
            "shape": tuple(value.shape),
            "abs_min": float(low),
            "abs_max": float(high),
            "zero": int((magnitude == 0).sum()) / count,
        }
        if not magnitude.is_floating_point():
            return TensorStatistics(**figures)
        own = value.dtype  # one of 8 bits has become float32
        narrow = own if own.is_floating_point and own.itemsize > 1 else magnitude.dtype
        if used_as in LOW_PRECISION and own in (torch.float32, torch.float64):
            narrow = used_as
        limits, bad, not_zero = torch.finfo(narrow), ~torch.isfinite(magnitude), magnitude > 0
        vanished = (magnitude.to(narrow) == 0) & not_zero
        small = (magnitude < limits.tiny) & not_zero & ~vanished
        nan = int(torch.isnan(magnitude).sum())
        rows = bad.reshape(bad.shape[0], -1).any(dim=1).nonzero() if bad.dim() else bad.new_empty(0, 1)
        return TensorStatistics(
            **figures,
            used_as=_name(narrow),
            nan=nan,
            inf=int(bad.sum()) - nan,
            range_used=float(magnitude.masked_fill(bad, 0).max()) / limits.max,
            flushed=int(vanished.sum()) / count,
            subnormal=int(small.sum()) / count,
            places=tuple(rows[:_PLACES_NAMED, 0].tolist()),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def json_number(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
