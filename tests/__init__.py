"""Tests of lightning-lockstep.

A package, so that ``tests.harness`` is importable under pytest's ``importlib`` mode without putting the
repository root on ``sys.path``: the installed wheel is what gets tested, never the source tree.
"""
