"""torch-xla, which nothing here imports before a strategy for it is used.

| file | holds |
| --- | --- |
| `availability` | what is known of torch-xla before it has its devices |
| `runtime` | torch-xla at work in this process: devices, random numbers, compilations |
| `mesh` | the devices of one process, and how batches and parameters are divided among them |
| `replicas` | the devices of several processes, and collectives between them |
| `precision`, `dtypes` | 16 bits by casting; which dtypes the first step has used |
| `gradients` | gradients as what follows a backward expects them |
| `lazy_run` | values read only where they are logged |
| `announcement` | long compilations announced |
| `accelerator` | Lightning's accelerator for XLA devices on the CPU |
| `forked` | ranks that are forked, as in a notebook |
"""
