"""The parts of the Hydra application: private, reached through `lightning_lockstep.train`.

| file | holds |
| --- | --- |
| `entry` | `hydra_main`: from the command line to the program's own function, on every rank |
| `command_line/` | everything that can be wrong with a command line, and its help |
| `config_channel` | sends the configuration to ranks that torchrun or srun started |
| `preflight` | the doctor's checks before any rank starts |
| `build`, `run`, `summary` | one training run: build, run, report |
| `checkpoints`, `tracking` | which checkpoint it resumes; what its loggers are given |
| `stopped_job`, `failure_file` | how an error leaves a job of Hydra; `failure.json` in the run folder |
| `quiet` | leaves out of the output what is for nobody |
"""
