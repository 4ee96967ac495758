"""DeepSpeed's configuration: read, checked against DeepSpeed, the device and the Trainer, and completed.

| file | holds |
| --- | --- |
| `reading` | the file or dictionary of the user, in today's spelling |
| `named_options` | the options of the strategy, joined with it |
| `known_keys`, `key_tables` | keys that DeepSpeed does not know; all that it does |
| `given` | what the Trainer under construction was given |
| `trainer_values`, `batch_sizes` | the configuration compared with the Trainer |
| `run_config` | all of it together, for each run |
| `run_values` | what a run that begins adds: loader, world size, steps |
| `module_optimizer` | what `configure_optimizers` returns beside it |
| `completion` | the complete configuration, every `auto` filled in |
| `device_support`, `unsupported`, `ops` | what DeepSpeed cannot do here |
| `adapting` | which of that is refused, and which replaced |
"""
