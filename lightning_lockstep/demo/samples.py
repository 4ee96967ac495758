"""What the samples of a data module are, in words: a model fits it where both have the same.

A data module says it as the class attribute ``yields``, a model as ``takes``. `lockstep-train` compares the two
before it starts any rank; a class without one is not compared.
"""

from __future__ import annotations

__all__ = ["BYTE_WINDOWS", "LABELLED_IMAGES"]

LABELLED_IMAGES = "images with a class each"
BYTE_WINDOWS = "windows of bytes"
