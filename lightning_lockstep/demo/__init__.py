"""Two small trainings on real data that need no download: `DigitsData` with `ConvNet`, `SourceTextData` with `ByteGPT`.

They are the pattern to copy: metrics reduced properly over ranks, a global batch that is the same on any number of
ranks, and checks of their settings that report every error at once.
"""

from lightning_lockstep._registry import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
