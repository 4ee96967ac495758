"""The parts of the Hydra application: private, reached through `lightning_lockstep.train`.

| module | holds |
| --- | --- |
| `entry` | `hydra_main`: from the command line to the program's own function, on every rank |
| `config_channel` | sends the configuration to ranks that torchrun or srun started |
| `config_check` | all checks of a command line together |
| `overrides` | are the groups and keys of the command line there? |
| `targets`, `value_types` | do the values fit what they are given to? |
| `faults` | one thing that is wrong with a command line, and how several are shown |
| `hydra_internals` | the one door to what Hydra keeps private |
| `checks`, `checkpoints` | what `lockstep-train` asks of a training run; which checkpoint it resumes |
| `build`, `run`, `summary` | one training run: build, run, report |
"""
