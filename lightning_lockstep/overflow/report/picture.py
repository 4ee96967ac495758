"""The picture of a report: how large each module's outputs were, against the largest number of the format."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_lockstep.errors import MissingExtraError

__all__ = ["draw"]

_WORST = 6
_FLOOR = 1e-8
_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan")


def draw(reports: Sequence[Mapping[str, Any]], history: Mapping[int, Mapping[str, float]]) -> bytes:
    """Return a PNG of the modules' largest outputs, also of those of the steps before where recorded.

    Drawn is the first report with a producer; ``history`` has, by step, the largest output of each module.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "matplotlib", extra="plot", needed_for="the picture of an overflow"
        ) from error
    report = next((r for r in reports if r["producer"] or r["backward_producer"]), reports[0])
    frames = report["frames"] or report["backward_frames"]
    many = len(history) > 1
    figure = Figure(figsize=(15 if many else 9, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if many else 1, squeeze=False, width_ratios=[1, 1.4] if many else None)[0]
    limit, dtype = _limit(frames)
    _draw_frames(axes[0], frames, limit, dtype)
    if many:
        _draw_history(axes[1], history, limit, dtype, producer=(report["producer"] or {}).get("module"))
    first = report["producer"] or report["backward_producer"] or {"module": "no module of this rank"}
    figure.suptitle(
        f"rank {report['rank']}, epoch {report['epoch']}, batch {report['batch_idx']}, step {report['step']}:"
        f" first produced by {first['module'] or 'the LightningModule'}"
    )
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw_frames(axes: Any, frames: Sequence[Mapping[str, Any]], limit: float, dtype: str) -> None:
    """Draw a row per module call: smallest to largest magnitude of its outputs; the last is the bad one."""
    names = []
    for row, frame in enumerate(frames):
        names.append(frame["module"] or frame["type"])
        outputs = [v for v in frame["values"] if v["label"].startswith(("output", "grad")) and "abs_max" in v]
        high = max((_number(v["abs_max"], limit) for v in outputs), default=_FLOOR)
        low = min((_number(v["abs_min"], limit) for v in outputs), default=_FLOOR)
        bad = any(v["bad"] for v in outputs)
        axes.plot([max(low, _FLOOR), max(high, _FLOOR)], [row, row], color="0.75", linewidth=3, zorder=1)
        axes.scatter(
            [max(high, _FLOOR)],
            [row],
            color="tab:red" if bad else "tab:blue",
            marker="X" if bad else "o",
            zorder=2,
        )
    axes.axvline(limit, color="tab:red", linestyle="--", linewidth=1)
    axes.text(limit, -0.8, f"{dtype} limit {limit:.3g}", color="tab:red", ha="right", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(_FLOOR / 2, limit * 30)
    axes.set_ylim(len(names) - 0.4, -1.6)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("magnitude of the outputs (smallest to largest); X: nan or inf")
    axes.set_title("the failing batch, in order of the calls", fontsize=10)


def _draw_history(
    axes: Any, history: Mapping[int, Mapping[str, float]], limit: float, dtype: str, *, producer: str | None
) -> None:
    """Draw a line per module over the steps; the producer and the largest while finite are named."""
    modules = list(dict.fromkeys(name for magnitudes in history.values() for name in magnitudes))
    steps = list(history)
    curves = {name: [_number(history[s].get(name, _FLOOR), limit) for s in steps] for name in modules}

    def largest_finite(name: str) -> float:
        values = (history[s].get(name, 0.0) for s in steps)
        return max((v for v in values if math.isfinite(v)), default=0.0)

    worst = sorted(modules, key=lambda name: (name != producer, -largest_finite(name)))[:_WORST]
    for name in modules:
        if name not in worst:
            axes.plot(steps, [max(v, _FLOOR) for v in curves[name]], color="0.85", linewidth=0.8)
    for index, name in enumerate(reversed(worst)):
        label = (name or "(LightningModule)") + (" (produced it)" if name == producer else "")
        style = (
            {"color": "tab:red", "linewidth": 2.4}
            if name == producer
            else {"linewidth": 1.6, "color": _COLOURS[index % len(_COLOURS)]}
        )
        axes.plot(steps, [max(v, _FLOOR) for v in curves[name]], marker=".", label=label, **style)
    axes.axhline(limit, color="tab:red", linestyle="--", linewidth=1)
    axes.text(steps[0], limit, f"{dtype} limit {limit:.3g}", color="tab:red", va="bottom", fontsize=8)
    axes.set_yscale("log")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("largest output magnitude; nan and inf drawn above the limit")
    axes.set_title(f"all modules over the last {len(steps)} steps; the largest are named", fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles[::-1], labels[::-1], fontsize=7, ncols=2, loc="outside lower right")


def _limit(frames: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Return the largest number of the narrowest format that any output was used in, and its name."""
    best = (math.inf, "float32")
    for frame in frames:
        for value in frame["values"]:
            name = value.get("used_as") or ""
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype) and not value["label"].startswith("input"):
                best = min(best, (float(torch.finfo(dtype).max), name))
    return best if math.isfinite(best[0]) else (float(torch.finfo(torch.float32).max), "float32")


def _number(value: Any, limit: float) -> float:
    """Return a magnitude that can be drawn; nan and inf go above the limit."""
    number = float(value)
    return number if math.isfinite(number) else limit * 10
