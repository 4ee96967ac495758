"""Which option would have saved a compilation."""

from __future__ import annotations

__all__ = ["Shapes", "advice_on_shapes"]

Shapes = tuple[tuple[int, ...], ...]


def advice_on_shapes(stage: str, shapes: Shapes, before: Shapes) -> str:
    """Return what gives a batch the shapes of the one before, as a sentence to add; empty: not known."""
    differing = _differing_dimensions(shapes, before)
    advice = []
    if 0 in differing:
        advice.append(_on_samples(stage, smaller=shapes[0][:1] < before[0][:1]))
    if differing - {0} and stage != "predict":
        advice.append("StaticShapes(sequence_lengths=[...]) pads sequences to a few lengths")
    found = "; ".join(filter(None, advice))
    return f". {found[0].upper()}{found[1:]}" if found else ""


def _on_samples(stage: str, *, smaller: bool) -> str:
    if stage == "predict":
        return "a number of samples that the batch size divides saves that"
    if not smaller:
        return "the same number of samples in every batch saves that"
    if stage == "training":
        return "StaticShapes(last_batch='drop') leaves such a batch out, last_batch='pad' fills it up"
    return "StaticShapes(evaluation_last_batch='pad') fills such a batch up"


def _differing_dimensions(shapes: Shapes, before: Shapes) -> set[int]:
    """Dimensions in which tensors differ; none where their number or kind is another."""
    if list(map(len, shapes)) != list(map(len, before)):
        return set()
    pairs = [
        pair
        for now, then in zip(shapes, before, strict=True)
        for pair in enumerate(zip(now, then, strict=True))
    ]
    return {dimension for dimension, (now, then) in pairs if now != then}
