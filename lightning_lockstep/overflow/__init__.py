"""Finding the module, rank and batch of a nan or infinity.

| file | holds |
| --- | --- |
| `settings`, `requirements` | the options of OverflowDetector, and what it refuses before training |
| `detection/` | what is looked at in every step |
| `diagnosis/` | which module made the first bad value: the batch replayed with its frames recorded |
| `report/` | what all ranks have found, put together and printed |
| `spots` | `detect_overflow`: a check at a place of the user's own choice |
"""
