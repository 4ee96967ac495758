"""The doctor: checks of a machine before a run, each with its evidence and the command that fixes what it found.

The names imported here are those with which other packages write checks.
"""

from lightning_lockstep._system import Completed as Completed
from lightning_lockstep.doctor.machine import Machine as Machine
from lightning_lockstep.doctor.registry import CheckOptions as CheckOptions
from lightning_lockstep.doctor.registry import CheckResult as CheckResult
from lightning_lockstep.doctor.registry import Finding as Finding
from lightning_lockstep.doctor.registry import Status as Status
from lightning_lockstep.doctor.registry import check as check
