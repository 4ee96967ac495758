"""Messages between ranks that need no collective.

| file | holds |
| --- | --- |
| `base` | what every channel does, and the one of a single process |
| `zeromq` | the channel over ZeroMQ |
| `opening`, `job_token` | how the ranks find the channel; the secret by which they know each other |
| `addresses`, `links` | where the ranks listen; the connections to them |
| `sender`, `receiver` | the thread that sends, the thread that receives |
| `peer_watch` | what has become of a peer whose connection ended |
| `gather`, `clock_offset` | one entry of every rank; how far a clock is from rank 0's |
"""
