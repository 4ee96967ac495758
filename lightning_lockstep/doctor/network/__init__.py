"""The check `network`: ranks connect to each other and communicate, stage by stage.

| file | holds |
| --- | --- |
| `examination` | all stages in turn, and the finding of each |
| `identity` | which rank of torchrun, mpirun or srun this process is, and where rank 0 is |
| `rendezvous` | connects the agents to their coordinator: on this host, by ssh, or ranks of another program |
| `links` | messages between coordinator and agent: authenticated over TCP, or over the pipes of ssh |
| `group` | all agents, as the coordinator sees them: one request to all, with one deadline |
| `agent` | runs for each rank and does what the coordinator asks |
| `rank_process` | the process below an agent in which a backend is tested; it may hang |
| `facts` | what an agent reports about its host: names, addresses, interfaces, shared memory, IOMMU |
| `connections` | which host reaches which, at which address; the interface that gloo chooses |
| `backends` | the test of gloo, nccl or mpi4py in steps: which failed first, on which ranks |
| `report` | the finding of a backend test |
| `launched_mpi` | mpi4py tested on ranks that an mpirun of the doctor starts on this host |
"""
