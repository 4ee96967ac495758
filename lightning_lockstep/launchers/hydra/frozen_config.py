"""A frozen configuration as bytes, for ranks that do not read the command line.

OmegaConf keeps the types of a structured config, so this is a pickle; but one that can hold nodes of OmegaConf,
dataclasses, enumerations and plain values only, and that is read only if it carries the signature of this job.

Types go by their names, even those that cannot be found under them here. In a process to which a launcher of sweeps has
sent the job, the classes of the program's own script are copies, and Hydra has loaded its plugins a second time.
"""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from lightning_lockstep.distributed.side_channel.job_token import signed, verified

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["class_named", "config_from_bytes", "config_to_bytes", "pickled"]

_PATHS = {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"}
_PLAIN = {
    "_operator": {"getitem"},  # annotations such as ``list[int]``
    "builtins": {
        *("Ellipsis", "NoneType", "bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list"),
        *("object", "set", "str", "tuple"),
    },
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "types": {"NoneType", "UnionType", "GenericAlias"},
    "typing": {"Any", "Dict", "List", "Literal", "Optional", "Sequence", "Tuple", "Union"},
}


def pickled(config: DictConfig | None) -> bytes:
    """Return a configuration as a pickle that the program itself can read, wherever this is called."""
    buffer = io.BytesIO()
    _ConfigPickler(buffer).dump(config)
    return buffer.getvalue()


def class_named(module: str, name: str) -> Any:
    """Return the class of this name; pickles refer to it."""
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _ConfigPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Let a class that is not the one under its name be that one for the reader."""
        if not isinstance(value, type) or _found_under_its_name(value):
            return NotImplemented
        return class_named, (value.__module__, value.__qualname__)


def _found_under_its_name(kind: type) -> bool:
    try:
        return class_named(kind.__module__, kind.__qualname__) is kind
    except (ImportError, AttributeError):
        return False


def config_to_bytes(config: DictConfig | None) -> bytes:
    """Return a configuration, or none, as bytes with the signature of this job."""
    return signed(pickled(config))


def config_from_bytes(data: bytes) -> DictConfig | None:
    """Return what :func:`config_to_bytes` was given."""
    # LaunchError: it does not come from a rank of this job; UnpicklingError: it is no configuration.
    config: DictConfig | None = _ConfigUnpickler(io.BytesIO(verified(data))).load()
    return config


class _ConfigUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, class_named.__name__):
            return self.find_class
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        found = super().find_class(module, name)
        nodes = module.startswith("omegaconf.") and isinstance(found, type)
        if nodes or (isinstance(found, type) and (issubclass(found, Enum) or is_dataclass(found))):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a configuration")
