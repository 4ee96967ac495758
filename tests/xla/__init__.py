"""Tests of the strategies for torch-xla, in an environment of their own: ``scripts/test`` makes it."""
