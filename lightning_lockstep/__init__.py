"""lightning-lockstep keeps every rank of a distributed PyTorch Lightning run in step.

Importing this package registers its strategies with Lightning and does nothing else; the public names
are loaded when first used. In the processes of our own commands, and for `--help`, it does not even that.
"""

from lightning_lockstep._registry import attach_stub as _attach_stub
from lightning_lockstep._registry import is_command as _is_command
from lightning_lockstep._registry import register_strategies as _register_strategies

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = _attach_stub(__name__, __file__)

if not _is_command():
    _register_strategies()
