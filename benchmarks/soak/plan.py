"""Which runs there are, and which one a seed stands for."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

#: How the ranks are started: by the program (``popen``, ``spawn``, ``fork``, and ``mpirun``, where the program runs
#: Open MPI's mpirun), or by a launcher that the user calls (``torchrun``, Open MPI's mpirun, MPICH's mpiexec, srun).
LAUNCHES = ("popen", "spawn", "fork", "torchrun", "mpirun", "open_mpi", "mpich", "srun")
OF_USER = ("open_mpi", "mpich", "srun")
WITH_MPI = ("mpirun", "open_mpi", "mpich")
#: Under these the process that the user starts is no rank, and makes the Trainer.
MULTIPROCESSING = ("spawn", "fork")

CALLBACKS = ("overflow", "stop", "early", "logging")

FAULTS = {
    "none": "nothing happens",
    "raise": "one rank raises in training_step",
    "raise_all": "every rank raises in training_step",
    "ours": "one rank raises an error of this package",
    "exit": "one rank calls sys.exit(3)",
    "kill": "one rank is killed (SIGKILL)",
    "stop": "one rank is stopped for good (SIGSTOP)",
    "stop_short": "one rank is stopped for a second",
    "memory": "one rank's address space is limited, and its next allocation fails",
    "nan": "the loss of one rank is nan",
    "slow": "one rank sleeps for longer than the silence limit",
    "holds_gil": "one rank holds the GIL for longer than the silence limit",
    "uneven": "the last rank has fewer batches",
    "disk": "the file of the logger is on a full disk",
    "folder": "the folder of the checkpoints cannot be made",
    "stdout": "nobody reads stdout any more, and rank 0 prints",
    "stderr": "nobody reads stderr any more",
    "stderr_raise": "nobody reads stderr any more, and one rank raises",
    "stranger": "strangers write to the side channel of every rank",
    "term_rank": "SIGTERM to one rank",
    "usr1_rank": "SIGUSR1 to one rank",
    "term_parent": "SIGTERM to the process that the user started",
    "usr1_parent": "SIGUSR1 to the process that the user started",
    "ctrl_c": "Ctrl-C",
    "ctrl_c_twice": "Ctrl-C, and again 0.3 s later",
    "second_fit": "every rank raises, the program catches it, works on and fits again; so does the last fit",
}
#: Where in a fit a fault of these may happen; all others happen in the first.
PHASES = ("training_step", "backward", "optimizer", "validation", "validation_end", "save", "epoch_end")
_IN_ANY_PHASE = (
    "raise",
    "raise_all",
    "ours",
    "exit",
    "kill",
    "stop",
    "stop_short",
    "slow",
    "holds_gil",
    "ctrl_c",
)
# Where the process that the user started is a rank, it is rank 0.
_ON_RANK_0 = ("disk", "folder", "stdout", "term_parent", "usr1_parent")
# What a launcher of the user's does with its own streams and signals is its own affair.
_NOT_WITH = {
    "stdout": OF_USER,
    "stderr": OF_USER,
    "stderr_raise": OF_USER,
    "term_parent": (*WITH_MPI, "srun"),  # they end their ranks on that
    "usr1_parent": ("torchrun", *OF_USER),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run."""

    seed: int  # what it was drawn from
    launch: str  # how the ranks are started
    ranks: int  # their number
    callbacks: tuple[str, ...]  # which callbacks the Trainer has
    fault: str  # what happens
    target: int  # the rank to which it happens, where it happens to one
    uneven_inputs: str = "error"  # what the strategy does about ranks with different numbers of batches
    stock: bool = False  # whether Lightning's own strategy is used
    phase: str = "training_step"  # in which the fault happens

    def __str__(self) -> str:
        where = f" rank {self.target} of {self.ranks} in {self.phase}"
        return f"{self.fault}{where}, {self.launch}, callbacks {'+'.join(self.callbacks) or 'none'}"

    def write(self, path: Path) -> None:
        """Leave it where the program reads it."""
        path.write_text(json.dumps(dataclasses.asdict(self)))


def draw(seed: int, *, stock: bool = False, launches: tuple[str, ...] = LAUNCHES) -> Plan:
    """Return the run that a seed stands for."""
    # Consecutive seeds go through all faults, in a new random order each time; the rest is drawn freely.
    cycle, position = divmod(seed, len(FAULTS))
    fault = random.Random(f"faults {cycle}").sample(sorted(FAULTS), len(FAULTS))[position]
    draws = random.Random(seed)
    possible = [
        launch for launch in LAUNCHES if launch not in _NOT_WITH.get(fault, ()) and not (stock and launch in WITH_MPI)
    ]
    launch = draws.choice(possible)
    if launch not in launches:
        launch = draws.choice([one for one in possible if one in launches])
    ranks = 3 if launch in ("popen", "fork") and draws.random() < 0.2 else 2
    callbacks = draws.choice(((), *((name,) for name in CALLBACKS), CALLBACKS))
    target = 0 if fault in _ON_RANK_0 else ranks - 1 if fault == "uneven" else draws.randrange(ranks)
    policy = draws.choice(("error", "truncate", "join"))
    phase = draws.choice(PHASES) if fault in _IN_ANY_PHASE else PHASES[0]
    return Plan(seed, launch, ranks, () if stock else callbacks, fault, target, policy, stock, phase)
