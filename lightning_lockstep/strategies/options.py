"""What a user may set on a strategy that wraps the model in DistributedDataParallel."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep.distributed.ddp_comm_hooks import HOOKS
from lightning_lockstep.errors import ConfigurationError

__all__ = ["DDPSettings", "reject_unknown"]

START_METHODS = ("popen", "spawn", "fork", "forkserver")
UNEVEN = ("error", "truncate", "join")


@dataclass(frozen=True, kw_only=True)
class DDPSettings:
    """Settings of a DDP strategy beyond those of its supervisor; see the strategy for the meaning.

    Raises:
        ConfigurationError: One message with every value that cannot be used.
    """

    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    uneven_inputs: Literal["error", "truncate", "join"] = "error"
    timeout: float | timedelta = 1800.0
    ddp_comm_hook: str | Callable[..., Any] | None = None
    ddp_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = []
        if self.start_method not in START_METHODS:
            faults.append(_one_of("start_method", self.start_method, START_METHODS))
        if self.uneven_inputs not in UNEVEN:
            faults.append(_one_of("uneven_inputs", self.uneven_inputs, UNEVEN))
        seconds = self.seconds
        if seconds is None or seconds <= 0:
            faults.append(f"timeout={self.timeout!r}: expected seconds, more than 0, such as 1800.")
        if isinstance(self.ddp_comm_hook, str) and self.ddp_comm_hook not in HOOKS:
            faults.append(_one_of("ddp_comm_hook", self.ddp_comm_hook, HOOKS, "or a function"))
        if faults:
            raise ConfigurationError(faults)

    @property
    def seconds(self) -> float | None:
        """The timeout [s], or ``None`` where it is no duration."""
        if isinstance(self.timeout, timedelta):
            return self.timeout.total_seconds()
        return float(self.timeout) if isinstance(self.timeout, (int, float)) else None


def reject_unknown(options: Mapping[str, Any], strategy: type) -> None:
    """Raise if an option is neither the strategy's nor DistributedDataParallel's.

    Args:
        options: Keyword arguments that the strategy did not take itself.
        strategy: The strategy's class.

    Raises:
        ConfigurationError: One message with every unknown name and its nearest right names.
    """
    of_ddp = set(inspect.signature(DistributedDataParallel.__init__).parameters)
    of_ddp -= {"self", "module", "device_ids", "output_device", "process_group"}
    own = {
        name
        for name, parameter in inspect.signature(strategy.__init__).parameters.items()  # type: ignore[misc]
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    known = sorted(of_ddp | own)
    faults = []
    for name in options:
        if name not in of_ddp:
            near = difflib.get_close_matches(name, known, n=3) or known
            faults.append(f"{strategy.__name__} has no option {name!r}. Nearest: {', '.join(near)}.")
    if faults:
        raise ConfigurationError(faults)


def _one_of(name: str, given: object, choices: tuple[str, ...], more: str = "") -> str:
    near = difflib.get_close_matches(str(given), choices, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{name}={given!r}: expected one of {', '.join(map(repr, choices))} {more}".rstrip() + f".{hint}"
