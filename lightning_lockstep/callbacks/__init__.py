"""One callback per file: it decides when all ranks act; the work is done in the subpackage of its feature.

The public names are loaded when first used.
"""

from lightning_lockstep._registry import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
