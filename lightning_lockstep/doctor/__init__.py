"""The doctor: checks of a machine before a run, each with its evidence and the command that fixes what it found.

| file | holds |
| --- | --- |
| `command` | the command `lockstep-doctor` and its options |
| `selection` | which checks a command line asks for, and which of their rows |
| `options` | what a user has asked of the checks |
| `registry` | the checks there are: of this package, and those that other packages add |
| `checks/` | the checks, one per file; `checks/network` and `checks/run` run only when named |
| `findings` | what a check returns: status, evidence, commands |
| `check_runner` | runs checks in processes, some at a time, each with a deadline |
| `check_process` | the process in which one check runs |
| `table`, `progress` | what is printed: the rows, and the line with the checks that still run |
| `machines/` | what a check may ask of a machine: this one, or one imitated from a record |
| `probes/` | programs that ask torch, DeepSpeed or MPI, which the doctor itself does not import |
| `cuda/` | driver, toolkits, compilers and GPUs, and the torch that they are for |
| `network/` | ranks that connect and communicate: agents, their coordinator, the test of each backend |
| `several_hosts/` | the same checks on several hosts, by ssh or as ranks, in one table |
| `run_folder` | the records and checkpoints of a run, as the check `run` reads them |

The names imported here are those with which other packages write checks.
"""

from lightning_lockstep._system import Completed as Completed
from lightning_lockstep.doctor.machine import Machine as Machine
from lightning_lockstep.doctor.registry import CheckOptions as CheckOptions
from lightning_lockstep.doctor.registry import CheckResult as CheckResult
from lightning_lockstep.doctor.registry import Finding as Finding
from lightning_lockstep.doctor.registry import Status as Status
from lightning_lockstep.doctor.registry import check as check
