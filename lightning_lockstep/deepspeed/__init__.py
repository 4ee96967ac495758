"""DeepSpeed: its configuration, its engine under Lightning's Trainer, its checkpoints, its compiled ops.

| file or folder | holds |
| --- | --- |
| `importing` | the one place that imports DeepSpeed |
| `configuration/` | the configuration: read, checked, completed |
| `builds/` | ops that are compiled: one rank builds, the others wait |
| `checkpoints/` | checkpoint folders: written, loaded, resumed, put together to one file |
| `engine` | the engine, and the process group that it uses |
| `precision` | the precision plugin: what the Trainer and the configuration ask for together |
| `loss_scale` | whether skipped optimizer steps are ordinary |
| `gradient_check` | where the engine keeps gradients, and how it skips one step |
| `plain_step`, `engine_trials`, `engine_state` | steps of a replay or a trial, and the state put back |
| `activation_checkpointing` | DeepSpeed's activation checkpointing, set from the configuration |
| `agreement` | a fault of one rank is raised on all |
| `shared_folder` | which ranks see the same folder |
| `memory_estimate`, `memory_formula` | memory for each stage of ZeRO: the table, the arithmetic |

``python -m lightning_lockstep.deepspeed.memory_estimate`` is a command for users.
"""
