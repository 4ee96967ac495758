"""The parts of the Hydra application: private, reached through `lightning_lockstep.train`.

| module | holds |
| --- | --- |
| `_hydra` | the one door to what Hydra keeps private |
| `faults` | one thing that is wrong with a command line, and how several are shown |
| `overrides` | are the groups and keys of the command line there? |
| `targets`, `value_types` | do the values fit what they are given to? |
| `preflight` | all checks of a command line together |
| `entry` | `hydra_main`: from the command line to the program's own function, on every rank |
| `external_ranks` | the configuration's way to ranks that torchrun or srun started |
| `components`, `fitting`, `summary` | one training run: build, run, report |
"""
