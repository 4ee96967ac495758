"""The doctor: checks of a machine before a run, each with its evidence and the command that fixes what it found.

What others write checks with stands here.
"""

from lightning_lockstep.doctor.findings import CheckResult as CheckResult
from lightning_lockstep.doctor.findings import Finding as Finding
from lightning_lockstep.doctor.findings import Status as Status
from lightning_lockstep.doctor.machines.machine import Completed as Completed
from lightning_lockstep.doctor.machines.machine import Machine as Machine
from lightning_lockstep.doctor.options import CheckOptions as CheckOptions
from lightning_lockstep.doctor.registry import check as check
