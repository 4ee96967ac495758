"""How ranks are started, and what the process that started them does when one ends.

For a strategy of one's own: :func:`detect_environment`.

| file | holds |
| --- | --- |
| `subprocess_script` | runs the same program again for each rank, and watches them |
| `multiprocessing` | ranks as children: spawn, fork, forkserver |
| `mpirun/` | ranks that mpirun starts |
| `notebook/` | ranks that a notebook starts |
| `hydra/` | Hydra programs started again as further ranks |
| `environments/` | which rank this process is, as Slurm, MPI or torchrun say |
| `rank_supervisor` | the life of one rank: its threads, its failures, its end |
| `rank_processes` | forked ranks of one launch, waited for together |
| `forwarding`, `ctrl_c` | signals passed on to ranks; Ctrl-C in a collective |
| `cpu_threads` | CPU threads and cores of a rank |
"""

from lightning_lockstep._exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
