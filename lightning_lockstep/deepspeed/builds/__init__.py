"""Operations that DeepSpeed compiles when they are first used: one rank of a node builds, the others wait.

| file | holds |
| --- | --- |
| `preparation` | `prepare_ops`: looked for, built once, loaded on all ranks |
| `loading` | the same for ops that `configure_optimizers` loads |
| `tools` | what a build needs of this host |
| `locks` | locks that killed builds have left |
| `wait` | how the ranks wait for those that build |
"""
