"""The backend ``mpi4py``: MPI collectives for an ordinary build of torch.

| file | holds |
| --- | --- |
| `backend` | registers the backend with torch, and its options; imports no MPI |
| `runtime`, `rendezvous` | MPI in this process; how the ranks of a job find each other |
| `process_group` | what torch calls, turned into operations |
| `reductions`, `transfers`, `point_to_point`, `sparse` | the collectives and messages, by kind |
| `arguments`, `staging` | what a collective accepts; tensors in memory that MPI can use |
| `operations` | what each collective does with MPI |
| `group_engine` | runs the operations of one group |
| `progress`, `work` | how an operation is stepped until it is done; the handle that torch gets |
| `rank_check`, `peers` | whether all ranks call the same; which of them have exited |
| `call_records` | the last collectives of a group, for the guard |
"""
