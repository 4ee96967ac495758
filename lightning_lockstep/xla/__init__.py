"""torch-xla: the runtime, the devices of one process as a mesh, and precision by casting.

Nothing here imports ``torch_xla`` before a strategy for it is used.
"""
