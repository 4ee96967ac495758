"""The largest batch that fits, and a run that survives a larger one.

| file | holds |
| --- | --- |
| `settings`, `report` | the options of AutoBatchSize; what people see of a search |
| `search`, `search_run` | which size to try next; a whole search on all ranks |
| `trial`, `memory/` | one size tried by real steps; what counts as out of memory |
| `loaders`, `attributes` | where the batch size lives, and real batches of any size |
| `runnable`, `effective_batch` | the largest size that the data allow; micro-batch x accumulation x ranks |
| `recovery/` | a batch that does not fit in mid-run |
| `refused` | the error of a search that cannot begin |
| `find_executable` | the decorator for code without a Trainer |
"""
