"""Two small trainings on real data that need no download.

=====================  ==========================================  ======================================
data                   where it comes from                         model that fits it
=====================  ==========================================  ======================================
`DigitsData`           scikit-learn's handwritten digits (8 x 8)   `ConvNet`, a small image classifier
`SourceTextData`       the bytes of Python's own standard library  `ByteGPT`, a small causal transformer
=====================  ==========================================  ======================================

They are the demo, the tests' real load and the pattern to copy: metrics reduced properly over ranks, a global
batch that is the same on any number of ranks, and checks of their settings that report every error at once.
"""

from lightning_lockstep._registry import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
