"""The strategies; the public names are loaded when first used.

| file | holds |
| --- | --- |
| `ddp`, `mpi`, `deepspeed`, `xla`, `xla_spmd` | one strategy each |
| `lifecycle` | `RankLifecycle`: what every strategy holds, also one of your own |
| `hooks` | where Lightning calls it |
| `options` | the settings: `LifecycleSettings` and those of each strategy |
| `given_environment` | the cluster environment: given, of a plugin, or detected |
| `placement` | the table of which rank runs where |
| `uneven_inputs`, `zero_loss` | ranks with different numbers of batches; losses of zero for them |
| `deepspeed_steps`, `deepspeed_checkpoints` | parts of `deepspeed` |
| `xla_steps`, `xla_pending` | what both strategies for XLA devices share |
"""

from lightning_lockstep._exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
