"""What a user has asked of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["CheckOptions"]


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of the command line that checks look at.

    Attributes:
        timeout: Longest time that a check may take [s]; ``None`` for its own.
        nproc: Ranks that a check starts on this host; ``None`` for its own choice.
        hosts: Names of the hosts of the run, as ``mpirun --host`` takes them.
        hostfile: File with the hosts of the run.
        ssh_args: Arguments for ssh, such as ``-p 2222``.
        folders: Run folders to look at.
        model_parameters: Parameters of the model that is to be trained, for estimates of memory.
        gpus: GPUs for which that is estimated; ``None`` for those of this host.
        strategy: Name of the strategy that is about to run; ``None`` outside a run.
    """

    timeout: float | None = None
    nproc: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str | None = None
    ssh_args: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    model_parameters: float | None = None
    gpus: int | None = None
    strategy: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return them in types that JSON has."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckOptions:
        """Return what :meth:`to_json` has written.

        Args:
            data: Its entries.
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**values)
