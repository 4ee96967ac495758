"""How ranks are started, and what the process that started them does when one ends.

For a strategy of one's own: :func:`detect_environment`.
"""

from lightning_lockstep._registry import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
