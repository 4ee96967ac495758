"""Statistics of tensors and of the values that a module takes and gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lockstep._doors.torch_internals import WRAPPED_MODULES, stored_values

# -- Names of modules, and of the values in their inputs and outputs --
# Containers are walked here and not by ``tree_flatten_with_path`` or ``apply_to_collection``: the former
# takes dataclasses and mappings of other classes (as Transformers' outputs are) for leaves unless they are
# registered, the latter hands out no names.

# Containers nested deeper are not looked into, which also ends cycles.
_DEPTH = 5


class NamePatterns:
    """Shell-style patterns for names such as ``decoder.block.0.output['mask']``."""

    # A pattern matches a name as printed, or with its indices written with dots
    # (``decoder.block.0.output.mask``).

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self.patterns = tuple(patterns)
        self._known: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.patterns)

    def match(self, name: str) -> bool:
        """Return whether any pattern matches the name."""
        if not self.patterns:
            return False
        if name not in self._known:
            dotted = name.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")
            self._known[name] = any(fnmatchcase(name, p) or fnmatchcase(dotted, p) for p in self.patterns)
        return self._known[name]


def module_names(root: nn.Module) -> dict[nn.Module, str]:
    """Return the name of ``root`` and of every module below it, as :func:`module_name` gives it."""
    return {module: module_name(name) for name, module in root.named_modules()}


def module_name(name: str) -> str:
    """Return a module's name without the wrappers that ``torch.compile`` and checkpointing put in."""
    return ".".join(p for p in name.split(".") if p not in WRAPPED_MODULES)


def parent_name(name: str) -> str:
    """Return the name of the module that contains the one named; the root's name is empty."""
    return name.rpartition(".")[0]


def call_values(args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (label, value) for all that a module was called with: ``input[i]``, ``input['name']``."""
    for index, value in enumerate(args if isinstance(args, tuple) else (args,)):
        yield from _walk(f"input[{index}]", value, _DEPTH)
    for name, value in kwargs.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            yield from _walk(f"input[{name!r}]", value, _DEPTH)


def output_values(output: Any, label: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield (label, value) for all that a module returned: ``output``, ``output[i][j]``, ``output['name']``."""
    yield from _walk(label, output, _DEPTH)


def _walk(label: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    children = _children(value) if depth else None
    if children is None:
        yield label, value
        return
    for key, child in children:
        yield from _walk(f"{label}[{key!r}]", child, depth - 1)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (Tensor, str, bytes)) or value is None:
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


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
    used_as: str = ""  # dtype of the computation: autocast's where that is narrower
    # Largest finite magnitude as a share of the largest number of used_as; None for integers.
    range_used: float | None = None
    zero: float = 0.0  # share of exact zeros
    subnormal: float = 0.0  # share below the smallest normal number of used_as that are not zero in it
    flushed: float = 0.0  # share of values that are not zero here, but zero in used_as
    places: tuple[int, ...] = ()  # first indices along dimension 0, often the batch, that hold nan or inf

    @property
    def bad(self) -> bool:
        """Whether any value is nan or infinite."""
        return bool(self.nan or self.inf)

    def remarks(self) -> str:
        """Return briefly what stands out beyond the magnitudes; empty where nothing does."""
        parts = []
        if self.nan:
            parts.append(f"{self.nan} nan")
        if self.inf:
            parts.append(f"{self.inf} inf")
        if self.places and self.shape and self.shape[0] > 1:
            parts.append(
                f"at [{', '.join(map(str, self.places))}{', ...' if len(self.places) == _PLACES_NAMED else ''}]"
            )
        if self.range_used is not None and self.range_used >= 0.001:
            parts.append(f"{self.range_used:.1%} of range")
        if self.zero >= 0.001:
            parts.append(f"{self.zero:.1%} zero")
        if self.flushed >= 0.001:
            parts.append(f"{self.flushed:.1%} flushed to zero")
        if self.subnormal >= 0.001:
            parts.append(f"{self.subnormal:.1%} subnormal")
        kind = self.dtype if self.used_as in ("", self.dtype) else f"{self.dtype} used as {self.used_as}"
        return f"{kind}: {', '.join(parts)}" if parts else ""

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them; nan and inf become text."""
        return {key: _json_number(value) for key, value in asdict(self).items()}


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
            tensor = stored_values(tensor)
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
    """Return whether a value is a tensor with a nan or an infinity; on a GPU it waits for the values."""
    tensor = plain_values(value)
    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    with torch.no_grad():
        low, high = torch.aminmax(tensor)
        ends = (float(low), float(high))
    return any(math.isnan(end) or (math.isinf(end) and not allow_inf) for end in ends)


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
        narrow = _narrower(value.dtype, used_as, magnitude.dtype)
        figures.update(_format_figures(magnitude, narrow, count), used_as=_name(narrow))
        if not (math.isfinite(figures["abs_max"]) and math.isfinite(figures["abs_min"])):
            figures.update(_bad_figures(magnitude))
        return TensorStatistics(**figures)


def _format_figures(magnitude: Tensor, narrow: torch.dtype, count: int) -> dict[str, float]:
    limits = torch.finfo(narrow)
    finite = magnitude.masked_fill(~torch.isfinite(magnitude), 0)
    not_zero = magnitude > 0
    vanished = (magnitude.to(narrow) == 0) & not_zero
    small = (magnitude < limits.tiny) & not_zero & ~vanished
    return {
        "range_used": float(finite.max()) / limits.max,
        "flushed": int(vanished.sum()) / count,
        "subnormal": int(small.sum()) / count,
    }


def _bad_figures(magnitude: Tensor) -> dict[str, Any]:
    bad = ~torch.isfinite(magnitude)
    places: tuple[int, ...] = ()
    if magnitude.dim() > 0:
        rows = bad.reshape(bad.shape[0], -1).any(dim=1)
        places = tuple(rows.nonzero()[:_PLACES_NAMED, 0].tolist())
    nan = int(torch.isnan(magnitude).sum())
    return {"nan": nan, "inf": int(bad.sum()) - nan, "places": places}


def _narrower(own: torch.dtype, used_as: torch.dtype | None, fallback: torch.dtype) -> torch.dtype:
    if used_as in LOW_PRECISION and own in (torch.float32, torch.float64):
        return used_as
    return own if own.is_floating_point and own.itemsize > 1 else fallback


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
