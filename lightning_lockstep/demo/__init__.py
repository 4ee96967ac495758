"""Two small trainings on real data that need no download.

=====================  ==========================================  ======================================
data                   where it comes from                         model that fits it
=====================  ==========================================  ======================================
`DigitsData`           scikit-learn's handwritten digits (8 x 8)   `ConvNet`, a small image classifier
`SourceTextData`       the bytes of Python's own standard library  `ByteGPT`, a small causal transformer
=====================  ==========================================  ======================================

They are the demo, the tests' real load and the pattern to copy: metrics reduced properly over ranks, a
global batch that is the same on any number of ranks (`lightning_lockstep.demo.global_batch_sampler`), and
checks of their settings that report every fault at once.
"""
