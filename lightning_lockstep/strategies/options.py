"""What a user may set on the strategies of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from lightning_lockstep._settings import Faults, debug, is_number, settings_of
from lightning_lockstep.distributed.c10d_operators import HOOKS
from lightning_lockstep.launchers.rank_supervisor import SupervisorSettings

START_METHODS = ("popen", "spawn", "fork", "forkserver")
UNEVEN_INPUTS = ("error", "truncate", "join")


@dataclass(frozen=True, kw_only=True)
class LifecycleSettings(SupervisorSettings):
    """Settings of the life cycle of a strategy's ranks; see :class:`LockstepDDPStrategy` for the meaning.

    Raises:
        ConfigurationError: One message with every value that cannot be used.
    """

    start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen"
    uneven_inputs: Literal["error", "truncate", "join"] = "error"
    timeout: float | timedelta = 1800.0

    def check(self, faults: Faults) -> None:
        """See :meth:`GuardSettings.check`."""
        super().check(faults)
        faults.choice("start_method", self.start_method, START_METHODS)
        faults.choice("uneven_inputs", self.uneven_inputs, UNEVEN_INPUTS)
        seconds = self.timeout.total_seconds() if isinstance(self.timeout, timedelta) else self.timeout
        usable = is_number(seconds) and seconds > 0
        faults.check(usable, "timeout", self.timeout, "seconds, more than 0, such as 1800")

    @property
    def supervisor(self) -> SupervisorSettings:
        """The settings of the rank supervisor; ``LOCKSTEP_DEBUG=1`` turns ``watch`` into ``verify``."""
        guard = "verify" if self.guard == "watch" and debug() else self.guard
        return settings_of(SupervisorSettings, {**vars(self), "guard": guard})

    @property
    def duration(self) -> timedelta:
        """The timeout."""
        return self.timeout if isinstance(self.timeout, timedelta) else timedelta(seconds=self.timeout)


@dataclass(frozen=True, kw_only=True)
class DDPSettings(LifecycleSettings):
    """Settings of a strategy that wraps the model in DistributedDataParallel."""

    process_group_backend: str | None = None
    ddp_comm_hook: str | Callable[..., Any] | None = None
    ddp_comm_state: object | None = None
    gradient_as_bucket_view: bool = True

    def check(self, faults: Faults) -> None:
        super().check(faults)
        if isinstance(self.ddp_comm_hook, str):
            faults.choice("ddp_comm_hook", self.ddp_comm_hook, HOOKS, more="or a function")
        faults.flag("gradient_as_bucket_view", self.gradient_as_bucket_view)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings(LifecycleSettings):
    """Settings of the strategy of DeepSpeed that are not part of DeepSpeed's configuration."""

    consolidate: bool = False
    adapt: bool = False
    remove_stale_locks: bool = False
    exclude_frozen_parameters: bool = False
    process_group_backend: str | None = None

    def check(self, faults: Faults) -> None:
        super().check(faults)
        faults.choice("start_method", self.start_method, ("popen",))
        for name in ("consolidate", "adapt", "remove_stale_locks", "exclude_frozen_parameters"):
            faults.flag(name, getattr(self, name))


def options_of_ddp() -> set[str]:
    """Return the options of DistributedDataParallel that a strategy hands on."""
    of_ddp = set(inspect.signature(DistributedDataParallel.__init__).parameters)
    return of_ddp - {"self", "module", "device_ids", "output_device", "process_group"}


def reject_unknown(options: Mapping[str, Any], strategy: type, accepted: Collection[str]) -> None:
    """Raise if an option is neither the strategy's nor one that it hands on."""
    own = {
        name
        for cls in strategy.__mro__
        for name, parameter in inspect.signature(cls.__init__).parameters.items()  # type: ignore[misc]
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    faults = Faults()
    unknown = [name for name in options if name not in accepted]
    faults.unknown(unknown, {*accepted, *own}, owner=strategy.__name__)
    faults.raise_all()
