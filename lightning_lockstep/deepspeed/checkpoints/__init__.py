"""Checkpoint folders of DeepSpeed: written whole or not at all, loaded, and put together to one plain file.

| file | holds |
| --- | --- |
| `saving` | a folder that is whole or not there |
| `file_names`, `files` | the files of a checkpoint: named, found, opened together |
| `plain_data` | a file read as plain data; no code of it is run |
| `partitions`, `values`, `unnamed_copies` | where the values of each parameter are |
| `optimizer_state` | the state of the optimizer for each parameter |
| `loading` | whole weights loaded into a model, divided or not |
| `resuming`, `redivision` | a fit resumed; its state divided among other ranks |
| `consolidation`, `plain_file` | one plain Lightning checkpoint, and how it is written |
| `command` | `lockstep-consolidate` |
"""
