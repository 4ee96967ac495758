"""Two small trainings on real data that need no download.

=====================  ==========================================  ======================================
data                   where it comes from                         model that fits it
=====================  ==========================================  ======================================
`DigitsData`           scikit-learn's handwritten digits (8 x 8)   `ConvNet`, a small image classifier
`SourceTextData`       the bytes of Python's own standard library  `ByteGPT`, a small causal transformer
=====================  ==========================================  ======================================

They are the demo, the tests' real load and the pattern to copy: metrics reduced properly over ranks, a
global batch that is the same on any number of ranks (`GlobalBatchSampler`), and
checks of their settings that report every fault at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_lockstep._exports import lazy

if TYPE_CHECKING:
    from lightning_lockstep.demo.byte_gpt import ByteGPT as ByteGPT
    from lightning_lockstep.demo.cnn import ConvNet as ConvNet
    from lightning_lockstep.demo.digits import DigitsData as DigitsData
    from lightning_lockstep.demo.global_batch_sampler import GlobalBatchSampler as GlobalBatchSampler
    from lightning_lockstep.demo.source_text import SourceTextData as SourceTextData
else:
    _NAMES = {
        "ByteGPT": "demo.byte_gpt",
        "ConvNet": "demo.cnn",
        "DigitsData": "demo.digits",
        "GlobalBatchSampler": "demo.global_batch_sampler",
        "SourceTextData": "demo.source_text",
    }
    __all__ = sorted(_NAMES)
    __getattr__, __dir__ = lazy(__name__, _NAMES)
